"""The names that GPT-J-era code imports and that today's jax and optax lack: tables, which `--check` reads too.

A provider is `module:name`, or a module; `install()` finds what is missing, and puts only that back.
"""

from shardformer.legacy.removed_library_names import LIBRARY_NAMES

# Names of jax.core that jax.extend.core has.
_CORE_NAMES = """
AbstractToken DebugInfo Effect Effects InconclusiveDimensionOperation JaxprTypeError TraceTag 
check_jaxpr concrete_or_error find_top_trace get_opaque_trace_state new_jaxpr_eqn no_effects
nonempty_axis_env_DO_NOT_USE primal_dtype_to_tangent_dtype set_current_trace take_current_trace unmapped_aval
unsafe_am_i_under_a_jit_DO_NOT_USE unsafe_am_i_under_a_vmap_DO_NOT_USE unsafe_get_axis_names_DO_NOT_USE
valid_jaxtype
"""

# Names whose meaning still exists under another one.
RENAMED = {
    "jax.tree_map": "jax.tree_util:tree_map",
    "jax.tree_multimap": "jax.tree_util:tree_map",
    "jax.tree_leaves": "jax.tree_util:tree_leaves",
    "jax.tree_flatten": "jax.tree_util:tree_flatten",
    "jax.tree_unflatten": "jax.tree_util:tree_unflatten",
    "jax.tree_structure": "jax.tree_util:tree_structure",
    "jax.tree_transpose": "jax.tree_util:tree_transpose",
    "jax.treedef_is_leaf": "jax.tree_util:treedef_is_leaf",
    "jax.tree_util.tree_multimap": "jax.tree_util:tree_map",
    "jax.host_count": "jax:process_count",
    "jax.host_id": "jax:process_index",
    "jax.partial": "functools:partial",
    "jax.ShapedArray": "jax.core:ShapedArray",
    "jax.abstract_arrays.ShapedArray": "jax.core:ShapedArray",
    "jax.xla": "jax.interpreters.xla",
    "jax.pxla": "jax.interpreters.pxla",
    "jax.interpreters.xla.DeviceArray": "jax:Array",
    "jax.interpreters.xla.ShapedArray": "jax.core:ShapedArray",
    "jax.interpreters.xla.abstractify": "jax.api_util:shaped_abstractify",
    "jax.interpreters.xla.canonicalize_dtype": "jax.dtypes:canonicalize_dtype",
    "jax.interpreters.pxla.ShardedDeviceArray": "jax:Array",
    "jax.lib.xla_bridge.get_backend": "jax.extend.backend:get_backend",
    "jax.lib.xla_bridge.default_backend": "jax:default_backend",
    "jax.lib.xla_bridge.devices": "jax:devices",
    "jax.lib.xla_bridge.device_count": "jax:device_count",
    "jax.lib.xla_bridge.local_devices": "jax:local_devices",
    "jax.lib.xla_bridge.local_device_count": "jax:local_device_count",
    "jax.lib.xla_bridge.host_count": "jax:process_count",
    "jax.lib.xla_bridge.host_id": "jax:process_index",
    "jax.config.config": "jax:config",
    "jax.clear_backends": "jax.extend.backend:clear_backends",
    "jax.ad_checkpoint.checkpoint": "jax:checkpoint",
    "jax.ad_checkpoint.remat": "jax:checkpoint",
    "jax.core.ConcretizationTypeError": "jax.errors:ConcretizationTypeError",
    "jax.core.TracerArrayConversionError": "jax.errors:TracerArrayConversionError",
    "jax.core.TracerIntegerConversionError": "jax.errors:TracerIntegerConversionError",
    "jax.core.UnexpectedTracerError": "jax.errors:UnexpectedTracerError",
    "jax.core.DropVar": "jax.extend.core:DropVar",
    "jax.core.Token": "jax.extend.core:Token",
    "jax.core.jaxprs_in_params": "jax.extend.core:jaxprs_in_params",
    "jax.core.mapped_aval": "jax.extend.core:mapped_aval",
    "jax.core.subjaxprs": "jax.extend.core:subjaxprs",
    "jax.core.Primitive": "jax.extend.core:Primitive",
    "jax.core.Jaxpr": "jax.extend.core:Jaxpr",
    "jax.core.ClosedJaxpr": "jax.extend.core:ClosedJaxpr",
    "jax.core.JaxprEqn": "jax.extend.core:JaxprEqn",
    "jax.core.Literal": "jax.extend.core:Literal",
    "jax.core.Var": "jax.extend.core:Var",
    "jax.core.jaxpr_as_fun": "jax.extend.core:jaxpr_as_fun",
    **{f"jax.core.{name}": f"jax.extend.core:{name}" for name in _CORE_NAMES.split()},
    "jax.core.get_aval": "jax:typeof",
    "jax.core.source_info_util": "jax.extend.source_info_util",
    "jax.experimental.array.Array": "jax:Array",
    "jax.experimental.export": "jax.export",
    "jax.experimental.layout.DeviceLocalLayout": "jax.experimental.layout:Layout",
    "jax.experimental.optix": "optax",
    "jax.experimental.sharding": "jax.sharding",
    "jax.array_ref": "jax:new_ref",
    "jax.ArrayRef": "jax:Ref",
    "jax.experimental.mutable_array": "jax:new_ref",
    "jax.experimental.MutableArray": "jax:Ref",
    "jax.sharding.AxisTypes": "jax.sharding:AxisType",
    "jax.sharding.MeshPspecSharding": "jax.sharding:NamedSharding",
    "jax.sharding.use_mesh": "jax:set_mesh",
    "jax.flatten_fun_nokwargs": "jax.api_util:flatten_fun_nokwargs",
    "jax.lib.xla_client": "jaxlib.xla_client",
    "jax.lib.xla_extension": "jaxlib.xla_client",
    "jax.prng": "jax.extend.random",
    "jax.lax.zeros_like_array": "jax.numpy:zeros_like",
    "jax.nn.normalize": "jax.nn:standardize",
    "jax.numpy.DeviceArray": "jax:Array",
    "jax.numpy.alltrue": "jax.numpy:all",
    "jax.numpy.sometrue": "jax.numpy:any",
    "jax.numpy.product": "jax.numpy:prod",
    "jax.numpy.cumproduct": "jax.numpy:cumprod",
    "jax.numpy.fix": "jax.numpy:trunc",
    "jax.numpy.in1d": "jax.numpy:isin",
    "jax.numpy.issubsctype": "jax.numpy:issubdtype",
    "jax.numpy.round_": "jax.numpy:round",
    "jax.numpy.row_stack": "jax.numpy:vstack",
    "jax.numpy.trapz": "jax.numpy:trapezoid",
    "jax.ops.index": "numpy:s_",
    "jax.profiler.TraceContext": "jax.profiler:TraceAnnotation",
    "jax.profiler.StepTraceContext": "jax.profiler:StepTraceAnnotation",
    "jax.profiler.trace_function": "jax.profiler:annotate_function",
    "jax.random.KeyArray": "jax:Array",
    "jax.random.PRNGKeyArray": "jax:Array",
    "jax.random.threefry2x32_p": "jax.extend.random:threefry2x32_p",
    "jax.random.threefry_2x32": "jax.extend.random:threefry_2x32",
    "jax.scipy.linalg.tril": "jax.numpy:tril",
    "jax.scipy.linalg.triu": "jax.numpy:triu",
    "jax.sharding.XLACompatibleSharding": "jax.sharding:Sharding",
    "jax.experimental.PartitionSpec": "jax.sharding:PartitionSpec",
    "jax.experimental.pjit.PartitionSpec": "jax.sharding:PartitionSpec",
    "jax.experimental.compilation_cache.compilation_cache.initialize_cache":
        "jax.experimental.compilation_cache.compilation_cache:set_cache_dir",
    "jax.experimental.maps.AxisName": "collections.abc:Hashable",
    "jax.experimental.maps.Mesh": "jax.sharding:Mesh",
    "jax.experimental.pjit.pjit_p": "jax.extend.core.primitives:jit_p",
    "jax.interpreters.pxla.Mesh": "jax.sharding:Mesh",
    "jax.interpreters.pxla.PartitionSpec": "jax.sharding:PartitionSpec",
    "jax.interpreters.pxla.MeshAxisName": "collections.abc:Hashable",
    "jax.experimental.optimizers": "jax.example_libraries.optimizers",
    "jax.experimental.stax": "jax.example_libraries.stax",
    "optax.AdditiveWeightDecayState": "optax:AddDecayedWeightsState",
    "optax.additive_weight_decay": "optax:add_decayed_weights",
    "optax.maybe_update": "optax:conditionally_transform",
    "optax.MaybeUpdateState": "optax:ConditionallyTransformState",
    "optax.dpsgd": "optax.contrib:dpsgd",
    "optax.differentially_private_aggregate": "optax.contrib:differentially_private_aggregate",
    "optax.DifferentiallyPrivateAggregateState": "optax.contrib:DifferentiallyPrivateAggregateState",
    "optax.fisher_diag": "optax.second_order:fisher_diag",
    "optax.hessian_diag": "optax.second_order:hessian_diag",
    "optax.hvp": "optax.second_order:hvp",
}  # fmt: skip

# Names that shardformer.legacy implements, and what one writes today.
REWRITTEN = {
    "jax.experimental.maps.xmap": ("shardformer.legacy.xmap:xmap", "jax.shard_map, or jax.vmap with jax.jit"),
    "jax.experimental.maps.mesh": ("shardformer.legacy.mesh_in_scope:mesh", "jax.sharding.Mesh"),
    "jax.experimental.maps.thread_resources": (
        "shardformer.legacy.mesh_in_scope:thread_resources", "pass the mesh along"),
    "jax.interpreters.pxla.thread_resources": (
        "shardformer.legacy.mesh_in_scope:thread_resources", "pass the mesh along"),
    "jax.experimental.maps.ResourceEnv": ("shardformer.legacy.mesh_in_scope:ResourceEnv", "pass the mesh along"),
    "jax.experimental.maps.SerialLoop": ("shardformer.legacy.axis_resources:SerialLoop", "jax.lax.map"),
    "jax.experimental.maps.serial_loop": ("shardformer.legacy.axis_resources:serial_loop", "jax.lax.map"),
    "jax.experimental.pjit.pjit": ("shardformer.legacy.pjit:pjit", "jax.jit with in_shardings, out_shardings"),
    "jax.experimental.pjit.with_sharding_constraint": (
        "shardformer.legacy.pjit:with_sharding_constraint", "jax.lax.with_sharding_constraint"),
    "jax.experimental.with_sharding_constraint": (
        "shardformer.legacy.pjit:with_sharding_constraint", "jax.lax.with_sharding_constraint"),
    "jax.experimental.maps.EMPTY_ENV": ("shardformer.legacy.mesh_in_scope:EMPTY_ENV", "pass the mesh along"),
    "jax.experimental.maps.ResourceSet": ("shardformer.legacy.removed_objects:ResourceSet", "a type of your own"),
    "jax.experimental.maps.xmap_p": (
        "shardformer.legacy.removed_objects:xmap_p", "nothing: it can be imported, and raises where it is used"),
    "jax.experimental.maps.make_xmap_callable": (
        "shardformer.legacy.removed_objects:make_xmap_callable",
        "xmap(...).lower(...).compile(): it can be imported, and raises where it is used"),
    "jax.experimental.pjit.AUTO": ("shardformer.legacy.pjit:AUTO", "jax.jit without that sharding"),
    "jax.experimental.pjit.FROM_GDA": ("shardformer.legacy.pjit:FROM_GDA", "jax.jit without that sharding"),
    "jax.experimental.pjit.ParsedPartitionSpec": (
        "shardformer.legacy.pjit:ParsedPartitionSpec", "jax.sharding.PartitionSpec"),
    "jax.experimental.global_device_array": (
        "shardformer.legacy.global_device_array", "jax.make_array_from_callback: every jax.Array may span processes"),
    "jax.experimental.host_callback": (
        "shardformer.legacy.host_callback", "jax.debug.callback, jax.pure_callback or jax.experimental.io_callback"),
    "jax.config.FLAGS": ("shardformer.legacy.removed_options:FLAGS", "jax.config.update(name, value)"),
    "jax.config.flags": ("shardformer.legacy.removed_options:flags", "jax.config"),
    "jax.config.enable_omnistaging": (
        "shardformer.legacy.removed_options:enable_omnistaging", "delete it: jax always stages everything"),
    "jax.core.axis_frame": ("shardformer.legacy.core_functions:axis_frame", "jax.lax.axis_size(name)"),
    "jax.core.gensym": ("shardformer.legacy.core_functions:gensym", "jax.extend.core.Var(aval)"),
    **{
        f"jax.interpreters.xla.{name}": (
            f"shardformer.legacy.xla_translation:{name}", "jax.interpreters.mlir.register_lowering")
        for name in ("TranslationContext", "XlaOp", "register_translation")
    },
    "jax.interpreters.xla.lower_fun": (
        "shardformer.legacy.xla_translation:lower_fun", "jax.interpreters.mlir.lower_fun"),
    "jax.interpreters.batching.not_mapped": ("shardformer.legacy.core_functions:not_mapped", "None"),
    "jax.core.NamedShape": ("shardformer.legacy.named_shapes:NamedShape", "a shape; fold_in axis_index for the names"),
    "jax.dlpack.to_dlpack": ("shardformer.legacy.replacements:to_dlpack", "x itself, or x.__dlpack__()"),
    "jax.lax.pdot": ("shardformer.legacy.named_products:pdot", "jax.numpy.einsum and jax.lax.psum"),
    "jax.lax.pgather": ("shardformer.legacy.named_products:pgather", "jax.lax.all_gather and indexing"),
    "jax.lax.xeinsum": ("shardformer.legacy.named_products:xeinsum", "jax.numpy.einsum and jax.lax.psum"),
    "jax.interpreters.pxla.make_sharded_device_array": (
        "shardformer.legacy.pmap_shardings:make_sharded_device_array", "jax.make_array_from_single_device_arrays"),
    **{
        f"jax.interpreters.pxla.{name}": (f"shardformer.legacy.pmap_shardings:{name}", "jax.sharding.NamedSharding")
        for name in ("Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec", "Unstacked")
    },
    "jax.api": ("shardformer.legacy.jax_api", "import the same name from jax"),
    "jax.linear_util": ("shardformer.legacy.jax_linear_util", "jax.extend.linear_util"),
    "jax.util": ("shardformer.legacy.jax_util", "functools and itertools"),
    "jax.xla_computation": (
        "shardformer.legacy.xla_computation:xla_computation", "jax.jit(f).lower(*arguments).compiler_ir('hlo')"),
    "jax.scipy.special.sph_harm": (
        "shardformer.legacy.replacements:sph_harm",
        "jax.scipy.special.sph_harm_y(n, m, phi, theta): its arguments in another order"),
    **{
        f"jax.random.{name}_key": (
            f"shardformer.legacy.replacements:{name}_key", f"jax.random.PRNGKey(seed, impl={name!r})")
        for name in ("rbg", "threefry2x32", "unsafe_rbg")
    },
    "jax.sharding.PmapSharding": ("shardformer.legacy.pmap_shardings:PmapSharding", "jax.sharding.NamedSharding"),
    "jax.sharding.PositionalSharding": (
        "shardformer.legacy.positional_sharding:PositionalSharding", "jax.sharding.NamedSharding"),
    "jax.experimental.x64_context.enable_x64": ("shardformer.legacy.replacements:enable_x64", "jax.enable_x64(True)"),
    "jax.experimental.x64_context.disable_x64": (
        "shardformer.legacy.replacements:disable_x64", "jax.enable_x64(False)"),
    "jax.experimental.enable_x64": ("shardformer.legacy.replacements:enable_x64", "jax.enable_x64(True)"),
    "jax.experimental.disable_x64": ("shardformer.legacy.replacements:disable_x64", "jax.enable_x64(False)"),
    "jax.curry": ("shardformer.legacy.replacements:curry", "functools.partial"),
    "jax.host_ids": ("shardformer.legacy.replacements:host_ids", "range(jax.process_count())"),
    "jax.lib.xla_bridge.host_ids": ("shardformer.legacy.replacements:host_ids", "range(jax.process_count())"),
    "jax.device_put_replicated": (
        "shardformer.legacy.replacements:device_put_replicated", "jax.device_put with a NamedSharding"),
    "jax.device_put_sharded": (
        "shardformer.legacy.replacements:device_put_sharded", "jax.device_put with a NamedSharding"),
    "jax.lax.tie_in": ("shardformer.legacy.replacements:tie_in", "its second argument"),
    "jax.numpy.NINF": ("shardformer.legacy.replacements:NINF", "-jax.numpy.inf"),
    "jax.numpy.PZERO": ("shardformer.legacy.replacements:PZERO", "0.0"),
    "jax.numpy.NZERO": ("shardformer.legacy.replacements:NZERO", "-0.0"),
    "jax.numpy.msort": ("shardformer.legacy.replacements:msort", "jax.numpy.sort(x, axis=0)"),
    "jax.ops.index_update": ("shardformer.legacy.replacements:index_update", "x.at[index].set(y)"),
    "jax.ops.index_add": ("shardformer.legacy.replacements:index_add", "x.at[index].add(y)"),
    "jax.ops.index_mul": ("shardformer.legacy.replacements:index_mul", "x.at[index].multiply(y)"),
    "jax.ops.index_min": ("shardformer.legacy.replacements:index_min", "x.at[index].min(y)"),
    "jax.ops.index_max": ("shardformer.legacy.replacements:index_max", "x.at[index].max(y)"),
    "jax.random.shuffle": (
        "shardformer.legacy.replacements:shuffle", "jax.random.permutation(key, x, independent=True)"),
    "jax.random.default_prng_impl": (
        "shardformer.legacy.replacements:default_prng_impl", "jax.random.key_impl(key), or jax.extend.random"),
    **{
        f"optax.{name}": (f"shardformer.legacy.gradient_estimators:{name}", "a copy of optax 0.1.8's monte_carlo")
        for name in (
            "control_delta_method", "moving_avg_baseline", "pathwise_jacobians", "score_function_jacobians")
    },
    "flax.nn": ("shardformer.legacy.flax_nn", "jax.nn for activations, flax.linen for modules"),
    "flax.optim": ("shardformer.legacy.flax_optim", "optax, and flax.training.train_state.TrainState"),
    **{
        f"flax.optim.{name}": (f"shardformer.legacy.flax_optim:{name}", advice)
        for name, advice in {
            "Adam": "optax.adam, or optax.adamw with weight_decay",
            "GradientDescent": "optax.sgd",
            "LAMB": "optax.lamb",
            "Momentum": "optax.sgd with momentum",
            "Optimizer": "optax, and flax.training.train_state.TrainState",
            "OptimizerDef": "optax.GradientTransformation",
            "OptimizerState": "the state of an optax transformation",
        }.items()
    },
    "optax.OptState": ("shardformer.legacy.optax_state:OptState", "subclass typing.NamedTuple"),
    "optax.chain": ("shardformer.legacy.optax_state:chain", "the same; its state is a tuple, no more a list"),
}  # fmt: skip

# Names that are still there and mean less than they did: for xmap's axes, named shapes and einsums, old keywords.
CHANGED = {
    "jax.lax.all_to_all": "shardformer.legacy.all_to_all_fix:all_to_all",
    "jax.lax.pswapaxes": "shardformer.legacy.all_to_all_fix:pswapaxes",
    "jax.lax.with_sharding_constraint": "shardformer.legacy.pjit:lax_with_sharding_constraint",
    "jax.numpy.einsum": "shardformer.legacy.named_products:einsum",
    "jax.dlpack.from_dlpack": "shardformer.legacy.replacements:from_dlpack",
    "jax.nn.initializers.variance_scaling": "shardformer.legacy.named_shapes:variance_scaling",
    "jax.random.bernoulli": "shardformer.legacy.named_shapes:bernoulli",
    "jax.random.normal": "shardformer.legacy.named_shapes:normal",
    "jax.random.truncated_normal": "shardformer.legacy.named_shapes:truncated_normal",
    "jax.random.uniform": "shardformer.legacy.named_shapes:uniform",
    "jax.numpy.clip": "shardformer.legacy.removed_keywords:clip",
    "jax.numpy.reshape": "shardformer.legacy.removed_keywords:reshape",
    "jax.numpy.where": "shardformer.legacy.removed_keywords:where",
    "jax.numpy.quantile": "shardformer.legacy.removed_keywords:quantile",
    "jax.numpy.percentile": "shardformer.legacy.removed_keywords:percentile",
    "jax.numpy.nanquantile": "shardformer.legacy.removed_keywords:nanquantile",
    "jax.numpy.nanpercentile": "shardformer.legacy.removed_keywords:nanpercentile",
    "jax.nn.softmax": "shardformer.legacy.removed_keywords:softmax",
    "jax.nn.log_softmax": "shardformer.legacy.removed_keywords:log_softmax",
    "jax.lax.cond": "shardformer.legacy.removed_keywords:cond",
    "jax.scipy.linalg.solve": "shardformer.legacy.removed_keywords:solve",
    "jax.pmap": "shardformer.legacy.removed_keywords:pmap",
    "jax.pure_callback": "shardformer.legacy.removed_keywords:pure_callback",
    "jax.checkpoint": "shardformer.legacy.removed_keywords:checkpoint",
    "jax.remat": "shardformer.legacy.removed_keywords:checkpoint",
}

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
}


def advice_of_module(name: str) -> str:
    """Returns the advice for a name that its module has lost; "" for other libraries."""
    home = name.rpartition(".")[0]
    while home and home not in OF_MODULES:
        home = home.rpartition(".")[0]
    return OF_MODULES.get(home, "")


# Names that `install()` does not put back, and what to write instead. A module stands for all that was in it. Hundreds
# more have gone from jax.core and jax.interpreters, or will: `--check` asks the libraries about them (OF_MODULES).
NOT_COVERED = {
    "haiku.experimental.named_call": "jax.named_call",
    "haiku.jit": "jax.jit around the transformed function",
    "jax.ad": "jax.interpreters.ad",
    "jax.ad_util": "jax.interpreters.ad",
    "jax.argnums_partial": "functools.partial",
    "jax.config.disable_omnistaging": "delete it: jax always stages everything",
    "jax.core.raise_to_shaped": "jax.typeof(x)",
    "jax.core.thread_local_state": "nothing",
    "jax.custom_ivjp": "jax.custom_vjp",
    "jax.custom_transforms": "jax.custom_jvp or jax.custom_vjp",
    "jax.defjvp": "jax.custom_jvp",
    "jax.defjvp_all": "jax.custom_jvp",
    "jax.defvjp": "jax.custom_vjp",
    "jax.defvjp_all": "jax.custom_vjp",
    "jax.experimental.array_api": "jax.numpy",
    "jax.experimental.callback": "jax.debug.callback",
    "jax.experimental.gda_serialization": "jax.experimental.array_serialization",
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
    "jax.tools.colab_tpu": "delete it: a TPU runtime needs no setup",
    "jax.tree_util.build_tree": "jax.tree_util.tree_unflatten",
    "optax.control_variates_jacobians": "a copy of optax 0.2's control variates",
    "optax.measure_valued_jacobians": "a copy of optax 0.2's estimators",
}

# The same, for names of one module with one advice.
_OF_ONE_MODULE = {
    ("jax.core", "AbstractUnit Unit UnitVar abstract_unit unit unitvar"): "nothing: jax has removed units",
    ("jax.core", "AxisEnvFrame extend_axis_env extend_axis_env_nd"): "jax.vmap with axis_name, or jax.shard_map",
    ("jax.core", "as_named_shape join_named_shapes subst_axis_names used_axis_names"): "nothing: shapes carry no names",
    ("jax.core", "ConcreteArray concrete_aval"): "jax.typeof(x), or isinstance(x, jax.core.Tracer)",
    ("jax.interpreters.ad", "zeros_like_jaxval zeros_like_p"): "jax.numpy.zeros_like",
    ("jax.interpreters.batching", "BatchTrace BatchTracer NotMapped"): "jax.custom_batching.custom_vmap",
    ("jax.interpreters.pxla", "spec_to_indices"):
        "jax.sharding.NamedSharding",
    ("jax.interpreters.pxla", "device_put replicate shard_args"): "jax.device_put with a NamedSharding",
    ("jax.interpreters.pxla", "parallel_callable xla_pmap xla_pmap_impl xla_pmap_p"): "jax.pmap",
    ("jax.interpreters.xla", "device_put device_put_p"): "jax.device_put",
    ("jax.interpreters.xla", "call_translations initial_style_translations parallel_translations"):
        "jax.interpreters.mlir.register_lowering",
    ("jax.interpreters.xla", "xla_call xla_call_p"): "jax.jit",
    ("jax.sharding", "GSPMDSharding"): "jax.sharding.NamedSharding",
    ("jax.tree_util", "AttributeKeyPathEntry"): "jax.tree_util.GetAttrKey",
    ("jax.tree_util", "GetitemKeyPathEntry"): "jax.tree_util.DictKey or jax.tree_util.SequenceKey",
    ("jax.tree_util", "register_keypaths"): "jax.tree_util.register_pytree_with_keys",
}  # fmt: skip
NOT_COVERED |= {f"{home}.{name}": today for (home, group), today in _OF_ONE_MODULE.items() for name in group.split()}
NOT_COVERED |= LIBRARY_NAMES

PROVIDERS = RENAMED | {name: provider for name, (provider, _) in REWRITTEN.items()}

# Whole modules that are gone, which `install()` makes again with the names above and nothing else.
MODULES = (
    "jax.abstract_arrays",
    "jax.config",
    "jax.experimental.maps",
    "jax.experimental.x64_context",
    "jax.lib.xla_bridge",
)


def today(name: str) -> str:
    """Returns today's spelling of a removed name, or advice."""
    if name in RENAMED:
        return RENAMED[name].replace(":", ".")
    return REWRITTEN[name][1] if name in REWRITTEN else NOT_COVERED[name]
