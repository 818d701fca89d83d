"""The names that GPT-J-era code imports and that today's jax, optax and NumPy lack: tables, which `--check` reads too.

A provider is `module:name`, or a module; `install()` finds what is missing, and puts only that back.
"""

from shardformer.legacy.lost_names import NOT_COVERED
from shardformer.legacy.numpy_names import NUMPY_RENAMED, NUMPY_REWRITTEN

# Names of jax.core that jax.extend.core has.
_CORE_NAMES = """
AbstractToken DebugInfo Effect Effects InconclusiveDimensionOperation JaxprTypeError TraceTag 
check_jaxpr concrete_or_error find_top_trace get_opaque_trace_state new_jaxpr_eqn no_effects
nonempty_axis_env_DO_NOT_USE primal_dtype_to_tangent_dtype set_current_trace take_current_trace unmapped_aval
unsafe_am_i_under_a_jit_DO_NOT_USE unsafe_am_i_under_a_vmap_DO_NOT_USE unsafe_get_axis_names_DO_NOT_USE
valid_jaxtype
"""

# Names of jax.interpreters.ad, which was jax.ad, too. Today's jax.ad has other names.
AD_NAMES = (
    "JVPTracer", "UndefinedPrimal", "Zero", "add_jaxvals", "defbilinear", "deflinear", "deflinear2", "defjvp",
    "defjvp2", "instantiate_zeros", "is_undefined_primal", "jvp", "primitive_jvps", "primitive_transposes",
    "zeros_like_aval",
)  # fmt: skip

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
    **{f"jax.ad.{name}": f"jax.interpreters.ad:{name}" for name in AD_NAMES},
    "jax.abstract_arrays.ShapedArray": "jax.core:ShapedArray",
    "jax.xla": "jax.interpreters.xla",
    "jax.pxla": "jax.interpreters.pxla",
    "jax._src.util.prod": "math:prod",
    "jax.interpreters.ad.config": "jax:config",
    "jax.interpreters.ad.source_info_util": "jax.extend.source_info_util",
    "jax.interpreters.xla.Device": "jax:Device",
    "jax.interpreters.xla.DeviceArray": "jax:Array",
    "jax.interpreters.xla.ShapedArray": "jax.core:ShapedArray",
    "jax.interpreters.xla.abstractify": "jax.api_util:shaped_abstractify",
    "jax.interpreters.xla.canonicalize_dtype": "jax.dtypes:canonicalize_dtype",
    # TensorFlow Probability 0.25, the last release, adds its variables to it.
    "jax.interpreters.xla.pytype_aval_mappings": "jax.core:pytype_aval_mappings",
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
    "jax.core.Shape": "collections.abc:Sequence",
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
    "jax.experimental.array_api": "jax.numpy",
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
    "jax.lib.xla_client.FftType": "jax.lax:FftType",
    "jax.lib.xla_client.bfloat16": "jax.numpy:bfloat16",
    **{
        f"{home}.xla_extension.{name}": today
        for home in ("jax.lib", "jaxlib")
        for name, today in {
            "ArrayImpl": "jax:Array", "Device": "jax:Device", "DeviceArray": "jax:Array",
            "PyTreeDef": "jax.tree_util:PyTreeDef", "XlaRuntimeError": "jax.errors:JaxRuntimeError",
        }.items()
    },
    "jax.prng": "jax.extend.random",
    "jax.lax.zeros_like_array": "jax.numpy:zeros_like",
    "jax.interpreters.ad.zeros_like_jaxval": "jax.numpy:zeros_like",
    "jax.nn.normalize": "jax.nn:standardize",
    "jax.numpy.DeviceArray": "jax:Array",
    "jax.numpy.alltrue": "jax.numpy:all",
    "jax.numpy.sometrue": "jax.numpy:any",
    "jax.numpy.product": "jax.numpy:prod",
    "jax.numpy.cumproduct": "jax.numpy:cumprod",
    "jax.numpy.fix": "jax.numpy:trunc",
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
    "haiku.experimental.named_call": "jax:named_call",
    **{
        f"chex.assert_tree_all_{name}": f"chex:assert_trees_all_{name}"
        for name in ("close", "equal_comparator", "equal_shapes", "equal_structs")
    },
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
    **NUMPY_RENAMED,
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
    **{
        f"jax.experimental.maps.{name}": (
            f"shardformer.legacy.removed_objects:{name}", "delete it: an array is always the whole array")
        for name in ("_PositionalSemantics", "_positional_semantics")
    },
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
    "jax.experimental.gda_serialization.serialization": (
        "shardformer.legacy.gda_serialization", "jax.experimental.array_serialization.serialization"),
    "jax.experimental.host_callback": (
        "shardformer.legacy.host_callback", "jax.debug.callback, jax.pure_callback or jax.experimental.io_callback"),
    "jax.config.FLAGS": ("shardformer.legacy.config_options:FLAGS", "jax.config.update(name, value)"),
    "jax.config.flags": ("shardformer.legacy.config_options:flags", "jax.config"),
    "jax.config.enable_omnistaging": (
        "shardformer.legacy.config_options:enable_omnistaging", "delete it: jax always stages everything"),
    "jax.core.axis_frame": ("shardformer.legacy.core_functions:axis_frame", "jax.lax.axis_size(name)"),
    "jax.core.thread_local_state": (
        "shardformer.legacy.core_functions:thread_local_state",
        "jax.extend.core.unsafe_am_i_under_a_jit_DO_NOT_USE()"),
    "jax.core.cur_sublevel": (
        "shardformer.legacy.core_functions:cur_sublevel", "jax.extend.core.get_opaque_trace_state()"),
    **{
        f"jax.{name}": (f"shardformer.legacy.custom_transforms:{name}", "jax.custom_jvp or jax.custom_vjp")
        for name in ("custom_transforms", "defjvp", "defjvp_all", "defvjp", "defvjp_all")
    },
    "jax.core.gensym": ("shardformer.legacy.core_functions:gensym", "jax.extend.core.Var(aval)"),
    **{
        f"jax.interpreters.xla.{name}": (
            f"shardformer.legacy.xla_translation:{name}", "jax.interpreters.mlir.register_lowering")
        for name in ("TranslationContext", "XlaOp", "register_translation")
    },
    "jax.interpreters.xla.lower_fun": (
        "shardformer.legacy.xla_translation:lower_fun", "jax.interpreters.mlir.lower_fun"),
    "jax.core.DShapedArray": (
        "shardformer.legacy.core_functions:DShapedArray", "nothing: no array has a dynamic shape"),
    "jax.core.is_constant_dim": (
        "shardformer.legacy.core_functions:is_constant_dim", "not jax.export.is_symbolic_dim(d)"),
    "jax.core.lattice_join": ("shardformer.legacy.core_functions:lattice_join", "a comparison of shapes and dtypes"),
    "jax.interpreters.ad.reducing_transposes": (
        "shardformer.legacy.core_functions:reducing_transposes", "nothing: no primitive has such a rule"),
    **{
        f"jax.{home}.{name}": (f"shardformer.legacy.core_functions:{name}", advice)
        for home in ("ad", "interpreters.ad")
        for name, advice in {
            "linearize": "jax.linearize, whose function jax.make_jaxpr can trace",
            "zeros_like_p": "nothing: no function of jax binds it",
        }.items()
    },
    "jax.lax._reduce_window_sum": (
        "shardformer.legacy.core_functions:_reduce_window_sum", "jax.lax.reduce_window(x, 0.0, jax.lax.add, ...)"),
    "jax.interpreters.batching.BatchTracer": (
        "shardformer.legacy.core_functions:BatchTracer", "jax.core.Tracer"),
    "jax.interpreters.batching.not_mapped": ("shardformer.legacy.core_functions:not_mapped", "None"),
    "jax.core.as_named_shape": ("shardformer.legacy.named_shapes:as_named_shape", "the shape itself"),
    "jax.core.raise_to_shaped": (
        "shardformer.legacy.core_functions:raise_to_shaped", "the abstract value itself, with its shape and dtype"),
    "jax.core.raise_to_shaped_mappings": (
        "shardformer.legacy.core_functions:raise_to_shaped_mappings", "nothing: no type needs such a rule"),
    "jax.core.NamedShape": ("shardformer.legacy.named_shapes:NamedShape", "a shape; fold_in axis_index for the names"),
    "jax.dlpack.to_dlpack": ("shardformer.legacy.replacements:to_dlpack", "x itself, or x.__dlpack__()"),
    "jax.lax.pdot": ("shardformer.legacy.named_products:pdot", "jax.numpy.einsum and jax.lax.psum"),
    "jax.lax.pgather": ("shardformer.legacy.named_products:pgather", "jax.lax.all_gather and indexing"),
    "jax.lax.xeinsum": ("shardformer.legacy.named_products:xeinsum", "jax.numpy.einsum and jax.lax.psum"),
    "jax.interpreters.pxla.shard_args": (
        "shardformer.legacy.pmap_shardings:shard_args", "jax.device_put with a NamedSharding"),
    "jax.interpreters.pxla.make_sharded_device_array": (
        "shardformer.legacy.pmap_shardings:make_sharded_device_array", "jax.make_array_from_single_device_arrays"),
    **{
        f"jax.interpreters.pxla.{name}": (f"shardformer.legacy.pmap_shardings:{name}", "jax.sharding.NamedSharding")
        for name in (
            "Chunked", "NoSharding", "Replicated", "ShardedAxis", "ShardingSpec", "Unstacked",
            "sharding_spec_sharding_proto", "spec_to_indices")
    },
    "jax.api": ("shardformer.legacy.jax_api", "import the same name from jax"),
    **dict.fromkeys(
        ("jax.interpreters.xla.xe", "jax.lib.xla_extension", "jaxlib.xla_extension"),
        ("shardformer.legacy.xla_extension", "jax.Array, jax.Device, jax.errors or type(jax.jit(f))")),
    "jax.linear_util": ("shardformer.legacy.jax_linear_util", "jax.extend.linear_util"),
    "jax.core.lu": ("shardformer.legacy.jax_linear_util", "jax.extend.linear_util"),
    "jax.util": ("shardformer.legacy.jax_util", "functools and itertools"),
    "jax.xla_computation": (
        "shardformer.legacy.xla_computation:xla_computation", "jax.jit(f).lower(*arguments).compiler_ir('hlo')"),
    "jax.test_util.JaxTestCase": (
        "shardformer.legacy.jax_test_util:JaxTestCase", "absl.testing.parameterized.TestCase and numpy.testing"),
    "jax.test_util.JaxTestLoader": (
        "shardformer.legacy.jax_test_util:JaxTestLoader", "absl.testing.absltest.TestLoader"),
    "jax.test_util.cases_from_list": (
        "shardformer.legacy.jax_test_util:cases_from_list", "the list itself, or a random part of it"),
    "jax.test_util._default_tolerance": (
        "shardformer.legacy.jax_test_util:_default_tolerance", "a dict of tolerances by dtype"),
    "jax.test_util.device_under_test": (
        "shardformer.legacy.jax_test_util:device_under_test", "jax.default_backend"),
    "jax.test_util.default_tolerance": (
        "shardformer.legacy.jax_test_util:default_tolerance", "a dict of tolerances by dtype"),
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
    **{
        f"jax.{name}": ("shardformer.legacy.gspmd_sharding:GSPMDSharding", "jax.sharding.NamedSharding")
        for name in (
            "sharding.GSPMDSharding", "sharding.OpShardingSharding", "experimental.sharding.OpShardingSharding")
    },
    "jax.tools.colab_tpu.setup_tpu": (
        "shardformer.legacy.replacements:setup_tpu", "delete it: a TPU runtime needs no setup"),
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
    "jax.numpy.in1d": ("shardformer.legacy.replacements:in1d", "jax.numpy.isin(x, y).ravel()"),
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
            "control_delta_method", "control_variates_jacobians", "measure_valued_jacobians", "moving_avg_baseline",
            "pathwise_jacobians", "score_function_jacobians")
    },
    **{
        f"flax.{home}": ("shardformer.legacy.flax_nn", "jax.nn for activations, flax.linen for modules")
        for home in ("nn", "deprecated.nn")
    },
    "flax.optim": ("shardformer.legacy.flax_optim", "optax, and flax.training.train_state.TrainState"),
    **{
        f"flax.optim.{name}": (f"shardformer.legacy.flax_optim:{name}", advice)
        for name, advice in {
            "Adafactor": "optax.adafactor",
            "Adam": "optax.adam, or optax.adamw with weight_decay",
            "GradientDescent": "optax.sgd",
            "LAMB": "optax.lamb",
            "ModelParamTraversal": "flax.traverse_util.ModelParamTraversal",
            "Momentum": "optax.sgd with momentum",
            "MultiOptimizer": "optax.multi_transform",
            "Optimizer": "optax, and flax.training.train_state.TrainState",
            "OptimizerDef": "optax.GradientTransformation",
            "OptimizerState": "the state of an optax transformation",
        }.items()
    },
    "optax.OptState": ("shardformer.legacy.optax_state:OptState", "subclass typing.NamedTuple"),
    "optax.chain": ("shardformer.legacy.optax_state:chain", "the same; its state is a tuple, no more a list"),
    **NUMPY_REWRITTEN,
}  # fmt: skip

# Names that are still there and mean less than they did: for xmap's axes, named shapes and einsums, old keywords.
CHANGED = {
    "jax.experimental.custom_partitioning.custom_partitioning": (
        "shardformer.legacy.partitioned_function:custom_partitioning"
    ),
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
    "jax.numpy.clip": "shardformer.legacy.keyword_functions:clip",
    "jax.numpy.reshape": "shardformer.legacy.keyword_functions:reshape",
    "jax.numpy.where": "shardformer.legacy.keyword_functions:where",
    "jax.numpy.quantile": "shardformer.legacy.keyword_functions:quantile",
    "jax.numpy.percentile": "shardformer.legacy.keyword_functions:percentile",
    "jax.numpy.nanquantile": "shardformer.legacy.keyword_functions:nanquantile",
    "jax.numpy.nanpercentile": "shardformer.legacy.keyword_functions:nanpercentile",
    "jax.nn.softmax": "shardformer.legacy.keyword_functions:softmax",
    "jax.nn.log_softmax": "shardformer.legacy.keyword_functions:log_softmax",
    "jax.lax.cond": "shardformer.legacy.keyword_functions:cond",
    "jax.scipy.linalg.solve": "shardformer.legacy.keyword_functions:solve",
    "jax.jit": "shardformer.legacy.keyword_functions:jit",
    "jax.pmap": "shardformer.legacy.pmap:pmap",
    "jax.pure_callback": "shardformer.legacy.keyword_functions:pure_callback",
    "jax.checkpoint": "shardformer.legacy.keyword_functions:checkpoint",
    "jax.remat": "shardformer.legacy.keyword_functions:checkpoint",
}

PROVIDERS = RENAMED | {name: provider for name, (provider, _) in REWRITTEN.items()}

# Whole modules that are gone, which `install()` creates with the names above and nothing else.
MODULES = (
    "jax.abstract_arrays",
    "jax.config",
    "jax.experimental.gda_serialization",
    "jax.experimental.maps",
    "jax.experimental.x64_context",
    "jax.lib.xla_bridge",
    "jax.tools.colab_tpu",
)


def today(name: str) -> str:
    """Returns today's spelling of a removed name, or advice."""
    if name in RENAMED:
        return RENAMED[name].replace(":", ".").removeprefix("builtins.")
    return REWRITTEN[name][1] if name in REWRITTEN else NOT_COVERED[name]
