"""Functions of one shard's arrays that are more than a line of JAX: no parameters, no configuration, no modules."""
