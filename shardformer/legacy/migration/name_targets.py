"""The removed names, keywords and members that have a mechanical answer, for `legacy --migrate`."""

from pathlib import Path

import jax

from shardformer.legacy import flax_nn
from shardformer.legacy.array_methods import LOST_METHODS
from shardformer.legacy.migration import shard_map_helpers
from shardformer.legacy.removed_names import RENAMED, REWRITTEN

_TREE_FUNCTIONS = ("all", "flatten", "leaves", "map", "reduce", "structure", "transpose", "unflatten")

# By removed name, the dotted name of today.
MOVED = {name: provider.replace(":", ".") for name, provider in RENAMED.items()} | {
    **{f"jax.Array.{method}": today for method, today in LOST_METHODS.items()},
    "jax.experimental.pjit.pjit": "jax.jit",
    **{f"jax.api.{name}": f"jax.{name}" for name in dir(jax) if not name.startswith("_")},
    "optax.additive_weight_decay": "optax.add_decayed_weights",
    **{
        f"flax.{home}.{name}": f"jax.nn.{name}"
        for home in ("nn", "deprecated.nn")
        for name in vars(flax_nn)
        if not name.startswith("_")
    },
}
# Shorter spellings, for attributes only: `from jax import tree_map` becomes `from jax.tree_util import tree_map`.
AS_ATTRIBUTE = {f"jax.tree_util.tree_{name}": f"jax.tree.{name}" for name in _TREE_FUNCTIONS}

HELPERS = "shard_map_helpers"
_LEGACY = Path(__file__).parents[1]
# Files of shardformer.legacy that need only jax and NumPy: the patch puts a copy, `legacy_NAME.py`, next to the files
# that use it.
_COPIED = (
    "core_functions", "flax_optim", "gda_serialization", "gradient_estimators", "global_device_array", "host_callback",
    "jax_api", "jax_linear_util", "jax_test_util", "jax_util", "numpy_functions", "pmap_shardings",
    "positional_sharding", "xla_computation", "xla_translation",
)  # fmt: skip
HELPER_FILES = {HELPERS: Path(shard_map_helpers.__file__)} | {
    f"legacy_{name}": _LEGACY / f"{name}.py" for name in _COPIED
}


def _copied(provider: str) -> tuple[str, str]:
    """Returns the helper file of a provider, and the name in the file; "" for a whole module."""
    module, _, name = provider.removeprefix("shardformer.legacy.").partition(":")
    return f"legacy_{module}", name


# By removed name, the helper file and the name that it has there; "" for a whole module.
IN_HELPERS = (
    {f"jax.{name}": (HELPERS, name) for name in ("device_put_replicated", "device_put_sharded")}
    | {
        f"jax.experimental.{home}with_sharding_constraint": (HELPERS, "with_sharding_constraint")
        for home in ("", "pjit.")
    }
    | {name: _copied(provider) for name, (provider, _) in REWRITTEN.items() if _copied(provider)[0] in HELPER_FILES}
)
WHOLE_MODULES = {name for name, (_, part) in IN_HELPERS.items() if not part}
# Values, with the module that their text starts with.
VALUES = {
    f"{home}.{name}": value
    for home in ("jax.numpy", "numpy")
    for name, value in {"NINF": ("-", f"{home}.inf"), "PZERO": ("0.0", ""), "NZERO": ("-0.0", "")}.items()
}
INDEX_METHODS = {
    "jax.ops.index_update": "set",
    "jax.ops.index_add": "add",
    "jax.ops.index_mul": "multiply",
    "jax.ops.index_min": "min",
    "jax.ops.index_max": "max",
}
# Modules that `import jax` does not load.
LOADED_BY_NAME = ("jax.extend", "jax.example_libraries", "jax.experimental", "flax.core")
# Members of arrays: the text after the array.
MEMBERS = {
    "device_buffer": "addressable_data(0)",
    "local_shards": "addressable_shards",
    "block_host_until_ready": "block_until_ready",
}
