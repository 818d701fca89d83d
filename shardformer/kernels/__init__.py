"""Functions of one shard's arrays that take more than a line of JAX: no parameters, no Config, no modules."""
