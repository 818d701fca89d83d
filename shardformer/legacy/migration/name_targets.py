"""The removed names, keywords and members that have a mechanical answer, for `legacy --migrate`."""

from shardformer.legacy.removed_names import RENAMED

_TREE_FUNCTIONS = ("all", "flatten", "leaves", "map", "reduce", "structure", "transpose", "unflatten")

# By removed name, the dotted name of today.
MOVED = {name: provider.replace(":", ".") for name, provider in RENAMED.items()} | {
    "jax.experimental.pjit.with_sharding_constraint": "jax.lax.with_sharding_constraint",
    "jax.experimental.with_sharding_constraint": "jax.lax.with_sharding_constraint",
    "jax.experimental.pjit.pjit": "jax.jit",
    "jax.linear_util": "jax.extend.linear_util",
    "haiku.experimental.named_call": "jax.named_call",
    "optax.additive_weight_decay": "optax.add_decayed_weights",
}
# Shorter spellings, for attributes only: `from jax import tree_map` becomes `from jax.tree_util import tree_map`.
AS_ATTRIBUTE = {f"jax.tree_util.tree_{name}": f"jax.tree.{name}" for name in _TREE_FUNCTIONS}
# Functions that shard_map_helpers.py defines.
IN_HELPERS = {f"jax.{name}": name for name in ("device_put_replicated", "device_put_sharded")}
# Values, with the module that their text starts with.
VALUES = {
    "jax.numpy.NINF": ("-", "jax.numpy.inf"),
    "jax.numpy.PZERO": ("0.0", ""),
    "jax.numpy.NZERO": ("-0.0", ""),
}
INDEX_METHODS = {
    "jax.ops.index_update": "set",
    "jax.ops.index_add": "add",
    "jax.ops.index_mul": "multiply",
    "jax.ops.index_min": "min",
    "jax.ops.index_max": "max",
}
# Modules that `import jax` does not load.
LOADED_BY_NAME = ("jax.extend", "jax.example_libraries", "jax.experimental")
# Members of arrays: the text after the array.
MEMBERS = {
    "device_buffer": "addressable_data(0)",
    "local_shards": "addressable_shards",
    "block_host_until_ready": "block_until_ready",
}
