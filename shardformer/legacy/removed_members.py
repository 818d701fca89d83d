"""Members that arrays and primitives have lost: tables, which `--check` reads without jax."""

REMOVED_MEMBERS = {
    "device_buffer": "x.addressable_data(0)",
    "device_buffers": "[shard.data for shard in x.addressable_shards]",
    "local_shards": "x.addressable_shards",
    "local_data": "x.addressable_data(i)",
    "unsafe_raw_array": "jax.random.key_data(x)",
    "to_py": "numpy.asarray(x)",
    "block_host_until_ready": "x.block_until_ready()",
    "map_primitive": "False: no primitive maps a function",
}
# Members that cannot be put back: an array does not keep what they returned.
LOST_MEMBERS = {"sharding_spec": "x.sharding"}
CALLED_PROPERTIES = {"device": "x.device, or x.devices() of an array on several"}
