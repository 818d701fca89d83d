"""The removed names that `install()` does not put back, with what to write instead: tables for `--check`."""

from shardformer.legacy.numpy_names import NUMPY_LOST
from shardformer.legacy.removed_library_names import LIBRARY_NAMES

# Advice for every other name that a module has lost: most were internal, and leaked into it.
OF_MODULES = {
    "jax": "import it from jax.extend, or from its own module",
    "jax.ad_checkpoint": "jax.checkpoint and jax.checkpoint_policies",
    "jax.api_util": "functools and inspect",
    "jax.cloud_tpu_init": "delete it: a TPU runtime needs no setup",
    "jax.core": "jax.extend.core, or a copy of the function from the release that had it",
    "jax.custom_derivatives": "jax.custom_jvp and jax.custom_vjp",
    "jax.dlpack": "jax.dlpack.from_dlpack and x.__dlpack__()",
    "jax.dtypes": "jax.numpy and ml_dtypes",
    "jax.example_libraries": "optax and haiku",
    "jax.experimental": "the module that jax's change log names, or a copy from the release that had it",
    "jax.experimental.pjit": "jax.jit and jax.sharding",
    "jax.experimental.shard_map": "jax.shard_map",
    "jax.extend": "jax.extend.core and jax.extend.backend",
    "jax.flatten_util": "jax.flatten_util.ravel_pytree",
    "jax.interpreters": "jax.extend, or a copy from the release that had it",
    "jax.interpreters.ad": "jax.custom_jvp, or jax.interpreters.ad.primitive_jvps",
    "jax.interpreters.batching": "jax.custom_batching.custom_vmap, or jax.interpreters.batching.primitive_batchers",
    "jax.interpreters.mlir": "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.partial_eval": "jax.make_jaxpr and jax.extend.core",
    "jax.interpreters.pxla": "jax.sharding and jax.device_put",
    "jax.interpreters.xla": "jax.interpreters.mlir and jax.jit(f).lower(*arguments)",
    "jax.lax": "jax.lax.reduce, jax.lax.pcast, or jax.extend.core.primitives",
    "jax.lib": "jax.extend.backend, or jaxlib",
    "jax.nn": "jax.nn and optax.losses",
    "jax.numpy": "numpy, whose functions have the same names",
    "jax.ops": "jax.Array.at",
    "jax.profiler": "jax.profiler.trace",
    "jax.random": "jax.random.key and jax.extend.random",
    "jax.ref": "jax.new_ref and jax.Ref",
    "jax.scipy": "scipy, whose functions have the same names",
    "jax.sharding": "jax.sharding.NamedSharding and jax.set_mesh",
    "jax.test_util": "jax.test_util.check_grads, and numpy.testing",
    "jax.tools": "jax.jit(f).lower(*arguments)",
    "jax.tree_util": "jax.tree",
    "numpy.core": "numpy, whose functions have the same names",
    "numpy.lib": "numpy, whose functions have the same names",
}


def advice_of_module(name: str) -> str:
    """Returns the advice for a name that its module has lost; "" for other libraries."""
    home = name.rpartition(".")[0]
    while home and home not in OF_MODULES:
        home = home.rpartition(".")[0]
    return OF_MODULES.get(home, "")


FLAX_MODELS = "pip install 'transformers<5' flax, which run on today's JAX: transformers 5 has no Flax models"


def flax_model(name: str) -> str | None:
    """Returns the name of a Flax model of transformers, or of its module, that `name` starts with."""
    library, *parts = name.split(".")
    number = next((n for n, part in enumerate(parts) if part.startswith("Flax") or "flax_" in part), None)
    if library != "transformers" or number is None:
        return None
    return ".".join([library, *parts[: number + 1]])


# Names that `install()` does not put back, and what to write instead. A module stands for all that was in it. Hundreds
# more have gone from jax.core and jax.interpreters, or will: `--check` asks the libraries about them (OF_MODULES).
NOT_COVERED = {
    "haiku.jit": "jax.jit around the transformed function",
    "jax.ad": "jax.interpreters.ad",
    "jax.ad_util": "jax.interpreters.ad",
    "jax.argnums_partial": "functools.partial",
    "jax.config.disable_omnistaging": "delete it: jax always stages everything",
    "jax.custom_ivjp": "jax.custom_vjp",
    "jax.experimental.callback": "jax.debug.callback",
    "jax.experimental.general_map": "jax.experimental.maps.xmap",
    "jax.experimental.loops": "jax.lax.fori_loop, jax.lax.while_loop or jax.lax.scan",
    "jax.experimental.sharded_jit": "jax.jit with in_shardings, out_shardings",
    "jax.interpreters.invertible_ad": "jax.custom_vjp",
    "jax.interpreters.masking": "nothing",
    "jax.interpreters.sharded_jit": "jax.jit with in_shardings, out_shardings",
    "jax.interpreters.xla.backend_specific_translations": "jax.interpreters.mlir.register_lowering",
    "jax.interpreters.xla.translations": "jax.interpreters.mlir.register_lowering",
    "jax.invertible": "jax.custom_vjp",
    "jax.lax.infeed": "jax.experimental.io_callback",
    "jax.lax.outfeed": "jax.debug.callback",
    "jax.lax_reference": "numpy and scipy",
    "jax.mask": "nothing",
    "jax.shapecheck": "nothing",
    "jax.soft_pmap": "jax.experimental.maps.xmap",
    "jax.spmd_mode": "delete it: nothing needs it",
    "jax.tree_util.build_tree": "jax.tree_util.tree_unflatten",
}

# The same, for names of one module with one advice.
_OF_ONE_MODULE = {
    ("jax.core", "AbstractUnit Unit UnitVar abstract_unit unit unitvar"): "nothing: jax has removed units",
    ("jax.core", "AxisEnvFrame extend_axis_env extend_axis_env_nd"): "jax.vmap with axis_name, or jax.shard_map",
    ("jax.core", "join_named_shapes subst_axis_names used_axis_names"): "nothing: shapes carry no names",
    ("jax.core", "ConcreteArray concrete_aval"): "jax.typeof(x), or isinstance(x, jax.core.Tracer)",
    ("jax.core", "MainTrace Sublevel new_base_main new_main new_sublevel"):
        "a function of jax.make_jaxpr(f)(*arguments), or jax.extend.core.set_current_trace",
    ("jax.interpreters.batching", "BatchTrace NotMapped"): "jax.custom_batching.custom_vmap",
    ("jax.interpreters.pxla", "device_put replicate"): "jax.device_put with a NamedSharding",
    ("jax.interpreters.pxla", "parallel_callable xla_pmap xla_pmap_impl xla_pmap_p"): "jax.pmap",
    ("jax.interpreters.xla", "device_put device_put_p"): "jax.device_put",
    ("jax.interpreters.xla", "call_translations initial_style_translations parallel_translations"):
        "jax.interpreters.mlir.register_lowering",
    ("jax.interpreters.xla", "xla_call xla_call_p"): "jax.jit",
    ("jax.lib.xla_client", "PaddingType XlaBuilder dtype_to_etype ops shape_from_pyval"):
        "jax.jit(f).lower(*arguments), or jaxlib.mlir",
    ("jax.lib.xla_client", "heap_profile"): "jax.profiler.device_memory_profile",
    ("jax.lib.xla_client", "mlir_api_version"): "jaxlib.version",
    ("jax.lib.xla_extension",
     "DistributedRuntimeClient get_distributed_runtime_client get_distributed_runtime_service"):
        "jax.distributed.initialize",
    ("jax.lib.xla_extension", "HloModule HloPrintOptions hlo_module_cost_analysis hlo_module_to_dot_graph"):
        "jax.jit(f).lower(*arguments).compile(): its as_text() and cost_analysis()",
    ("jax.lib.xla_extension", "PjitFunctionCache jax_jit"): "jax.jit",
    ("jax.lib.xla_extension", "pmap_lib"): "jax.pmap",
    ("jax.lib.xla_extension", "ifrt_proxy"): "nothing",
    ("jax.lib.xla_extension", "mlir"): "jaxlib.mlir",
    ("jax.lib.xla_extension", "profiler"): "jax.profiler",
    ("jax.lib.xla_extension", "pytree"): "jax.tree_util",
    ("jax.prng", "PRNGImpl"): "jax.extend.random.define_prng_impl",
    ("jax.tree_util", "AttributeKeyPathEntry"): "jax.tree_util.GetAttrKey",
    ("jax.tree_util", "GetitemKeyPathEntry"): "jax.tree_util.DictKey or jax.tree_util.SequenceKey",
    ("jax.tree_util", "register_keypaths"): "jax.tree_util.register_pytree_with_keys",
}  # fmt: skip
NOT_COVERED |= {f"{home}.{name}": today for (home, group), today in _OF_ONE_MODULE.items() for name in group.split()}
NOT_COVERED |= LIBRARY_NAMES | NUMPY_LOST
