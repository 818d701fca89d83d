"""The keywords that functions have lost: tables, which `--check` reads without jax."""

BY_POSITION = "the arguments by position"
# By function: today's spelling of each removed keyword, or advice.
REMOVED_KEYWORDS = {
    "jax.numpy.clip": {"a": "arr, by position", "a_min": "min", "a_max": "max", "out": "nothing"},
    "jax.numpy.reshape": {"newshape": "shape"},
    "jax.numpy.where": dict.fromkeys(("condition", "x", "y"), BY_POSITION),
    "jax.numpy.quantile": {"interpolation": "method"},
    "jax.numpy.percentile": {"interpolation": "method"},
    "jax.numpy.nanquantile": {"interpolation": "method"},
    "jax.numpy.nanpercentile": {"interpolation": "method"},
    "jax.nn.softmax": {"initial": "nothing"},
    "jax.nn.log_softmax": {"initial": "nothing"},
    "jax.lax.cond": {"linear": "nothing"},
    "jax.scipy.linalg.solve": {"sym_pos": "assume_a='pos'"},
    "jax.pmap": {"global_arg_shapes": "nothing"},
    "jax.pure_callback": {"vectorized": "vmap_method='expand_dims' or 'sequential'"},
    "jax.checkpoint": {"concrete": "static_argnums"},
    "jax.remat": {"concrete": "static_argnums"},
    "jax.experimental.pjit.pjit": {"in_axis_resources": "in_shardings", "out_axis_resources": "out_shardings"},
}

# Keywords that `install()` does not put back, from the signatures of 0.4.13 and 0.4.30.
LOST_KEYWORDS = {
    "haiku.cond": {"linear": "nothing"},
    "jax.ShapeDtypeStruct": {"named_shape": "nothing: shapes carry no names"},
    "jax.core.ShapedArray": {"named_shape": "nothing: shapes carry no names"},
    "jax.core.Trace": {"main": "nothing: a trace has no main trace", "sublevel": "nothing"},
    "jax.dtypes.canonicalize_dtype": {"allow_opaque_dtype": "allow_extended_dtype"},
    "jax.example_libraries.stax.log_softmax": {"initial": "nothing"},
    "jax.example_libraries.stax.logsoftmax": {"initial": "nothing"},
    "jax.example_libraries.stax.softmax": {"initial": "nothing"},
    "jax.experimental.multihost_utils.ltg_batcher": dict.fromkeys(
        ("spmd_axis_name", "axis_size", "axis_name", "main_type"), "axis_data"
    ),
    "jax.interpreters.ad.JVPTrace": {"main": "parent_trace, tag", "sublevel": "nothing"},
    "jax.interpreters.ad.backward_pass": {"reduce_axes": "nothing", "cotangents_in": "cts_in"},
    "jax.interpreters.batching.batch_jaxpr_axes": dict.fromkeys(
        ("axis_size", "axis_name", "spmd_axis_name", "main_type"), "axis_data"
    ),
    "jax.interpreters.batching.defreducer": {"ident": "nothing"},
    "jax.interpreters.mlir.LoweringRuleContext": {"compute_type": "jaxpr_eqn_ctx"},
    "jax.interpreters.mlir.ModuleContext": {
        "backend_or_name": "backend", "platform": "platforms", "name_stack": "nothing",
        "cached_call_jaxpr_lowerings": "lowering_cache"},
    "jax.interpreters.mlir.emit_python_callback": {"operand_layouts": "nothing", "result_layouts": "nothing"},
    "jax.interpreters.mlir.ir_constant": {"canonicalize_types": "aval"},
    "jax.interpreters.mlir.ir_constants": {"canonicalize_types": "aval"},
    "jax.interpreters.mlir.jaxpr_subcomp": {"consts": "consts_for_constvars"},
    "jax.interpreters.mlir.lower_jaxpr_to_fun": {
        "create_tokens": "nothing", "public": "main_function", "replace_tokens_with_dummy": "nothing",
        "num_output_tokens": "nothing", "api_name": "nothing", "name_stack": "nothing"},
    "jax.interpreters.mlir.lower_jaxpr_to_module": {
        "backend_or_name": "backend", "platform": "platforms", "name_stack": "nothing",
        "num_replicas": "num_partitions"},
    "jax.interpreters.partial_eval.trace_to_jaxpr_dynamic": {"debug_info": "the debug_info of the WrappedFun"},
    "jax.jit": {"abstracted_axes": "jax.export.symbolic_shape", "fun": "the first argument, by position"},
    "jax.lax.random_gamma_grad": {"a": "the first argument, by position", "x": "the second argument, by position"},
    "jax.make_jaxpr": {"abstracted_axes": "jax.export.symbolic_shape"},
    "jax.numpy.einsum": {"_use_xeinsum": "nothing: named axes in braces need no keyword"},
    "jax.numpy.einsum_path": {"subscripts": "the first argument, by position"},
    "jax.numpy.from_dlpack": {"x": "the first argument, by position"},
    "jax.numpy.save": {"fix_imports": "nothing"},
    "jax.numpy.ufunc": {"update_doc": "nothing"},
    "jax.dlpack.from_dlpack": {"dlpack": "external_array, by position"},
    "jax.scipy.special.exp1": {"module": "nothing"},
    "optax.per_example_layer_norm_clip": {"eps": "nothing"},
}  # fmt: skip
