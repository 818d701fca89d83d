"""`legacy --migrate`: the xmaps of a file as `jax.shard_map`, as a patch to read, change and apply."""
