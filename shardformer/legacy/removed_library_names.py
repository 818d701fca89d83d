"""The names that flax, chex, TensorFlow Probability, optax and haiku have lost, and that do not come back.

A name stands for everything under it; so does a module.
"""

_OPTIMIZERS = {
    "AdaBelief": "optax.adabelief", "Adadelta": "optax.adadelta", "Adagrad": "optax.adagrad",
    "LARS": "optax.lars", "RMSProp": "optax.rmsprop",
    "DynamicScale": "flax.training.dynamic_scale.DynamicScale",
    "WeightNorm": "flax.linen.WeightNorm",
}  # fmt: skip
_TFP = "tensorflow_probability.substrates"

# By module, its lost names with the replacement of each.
_NAMES = {
    "flax": {
        "deprecated": "flax.linen", "config.bool_env": "os.environ",
    },
    "flax.optim": _OPTIMIZERS,
    "flax.core": {"trace_level": "nothing", "named_call": "jax.named_call"},
    "flax.core.lift": {"Axis": "flax.typing.Axis", "ScanAxis": "flax.typing.ScanAxis", "T": "typing.TypeVar",
                       "named_call": "jax.named_call", "transform": "flax.core.lift.pack",
                       "transform_module": "flax.linen.map_variables"},
    "flax.core.scope": {"FrozenCollection": "flax.typing.FrozenVariableDict", "Variables": "flax.typing.VariableDict",
                        "MaybeFrozenCollection": "flax.typing.Collection"},
    "flax.core.tracers": {"trace_level": "nothing"},
    "flax.configurations": {"define_bool_state": "flax.config.update", "flax_lazy_rng": "nothing: it is always on",
                            "flax_relaxed_naming": "nothing: it is always on"},
    "flax.errors": {"ApplyScopeInvalidVariablesError": "flax.errors.ApplyScopeInvalidVariablesTypeError",
                    "GDACheckpointingRequiredError": "flax.errors.MPACheckpointingRequiredError",
                    "GDARestoreTargetRequiredError": "flax.errors.MPARestoreTargetRequiredError",
                    "MPARestoreTypeNotMatchError": "orbax.checkpoint"},
    "flax.linen": {"ConvLSTM": "flax.linen.ConvLSTMCell", "dotgetter": "a dict",
                   "GeGLU": "flax.linen.Dense and flax.linen.gelu"},
    "flax.linen.activation": {"GeGLU": "flax.linen.Dense and flax.linen.gelu"},
    "flax.linen.fp8_ops": dict.fromkeys(("q_dot_dq", "qdq_and_return", "quantize_dequantize", "quantized_dot_impl"),
                                        "flax.linen.Fp8DotGeneralOp"),
    "flax.linen.partitioning": {"UnassignedAxis": "nothing: it was flax's own"},
    "flax.linen.transforms": dict.fromkeys(("decorator_lift_transform_jit", "module_class_lift_transform_jit"),
                                           "flax.linen.jit"),
    "flax.linen.recurrent": {"ConvLSTM": "flax.linen.ConvLSTMCell", "LEGACY_UPDATE_MESSAGE": "nothing",
                             "NEVER": "nothing", "RNNCellCompatibilityMeta": "nothing", "Shape": "flax.typing.Shape",
                             "deprecation_method_decorator": "nothing"},
    "flax.linen.dtypes": {"Array": "jax.Array"},
    "flax.linen.stochastic": {"KeyArray": "jax.Array"},
    "flax.linen.experimental.layers_with_named_axes": {
        "DType": "flax.typing.Dtype", "IntSequence": "collections.abc.Sequence", "PRNGKey": "jax.Array",
        "Shape": "flax.typing.Shape"},
    "flax.linen.module": {
        "Array": "jax.Array", "KeyArray": "jax.Array",
        **dict.fromkeys(("all_names_on_object", "get_local_method_names", "get_suffix_module_pairs",
                         "get_unbound_fn", "is_module_tree", "wrap_method"), "nothing: they were flax's own")},
    "flax.linen.spmd": {"PartitionSpecPytree": "typing.Any", "logical_axis_rules": "flax.linen.logical_axis_rules",
                        "set_logical_axis_rules": "flax.linen.set_logical_axis_rules"},
    "flax.training.checkpoints": {"GDA_PH": "orbax.checkpoint"},
    "flax.traverse_util": {"Path": "flax.typing.PathParts"},
    "chex": {"CpuDevice": 'jax.Device, and device.platform == "cpu"',
             "GpuDevice": 'jax.Device, and device.platform == "gpu"',
             "TpuDevice": 'jax.Device, and device.platform == "tpu"'},
    "haiku.experimental": {"profiler_name_scopes": "jax.named_scope"},
    "optax": {"FactoredParameterStats": "optax.FactoredState", "InitUpdate": "a copy of optax 0.1's control variates",
              "ScaleByFromageState": "optax.EmptyState", "scale_by_fromage": "optax.fromage",
               "monte_carlo": "a copy of optax 0.1.8's"},
    "optax.contrib": dict.fromkeys((
        "cocob.COCOBState", "cocob.cocob", "complex_valued", "dadapt_adamw.DAdaptAdamWState",
        "dadapt_adamw.dadapt_adamw", "mechanic", "privacy", "prodigy.ProdigyState", "prodigy.prodigy",
        "reduce_on_plateau.ReduceLROnPlateauState", "reduce_on_plateau.reduce_on_plateau", "sam.NormalizeState",
        "sam.SAMState", "sam.normalize", "sam.sam"), "from optax.contrib import it"),
    "optax.experimental": {"GradientTransformationWithExtraArgs": "optax.GradientTransformationExtraArgs",
                           "named_chain": "optax.named_chain",
                           "SplitRealAndImaginaryState": "optax.contrib.SplitRealAndImaginaryState",
                           "split_real_and_imaginary": "optax.contrib.split_real_and_imaginary"},
    "optax.schedules": {"inject": "optax.inject_hyperparams"},
}  # fmt: skip

# The same of TensorFlow Probability, under both of its substrates.
_TFP_NAMES = {
    "bijectors": {"Affine": "bijectors.Shift and bijectors.ScaleMatvecTriL, chained",
                  "AffineLinearOperator": "bijectors.Shift and bijectors.ScaleMatvecLinearOperator, chained",
                  "AffineScalar": "bijectors.Shift and bijectors.Scale, chained", "Ordered": "bijectors.Ascending",
                  "affine": "bijectors.ScaleMatvecTriL", "affine_scalar": "bijectors.Scale",
                  "affine_linear_operator": "bijectors.ScaleMatvecLinearOperator", "ordered": "bijectors.Ascending"},
    "distributions": {"VectorExponentialDiag": "distributions.TransformedDistribution of an Exponential",
                      "joint_distribution.dummy_seed": "a seed of your own",
                      "joint_distribution_sample_path_mixin": "JointDistributionCoroutineAutoBatched",
                      "joint_distribution_vmap_mixin": "JointDistributionCoroutineAutoBatched",
                      "vector_exponential_diag": "distributions.TransformedDistribution of an Exponential",
                      "vector_exponential_linear_operator":
                          "distributions.TransformedDistribution of an Exponential"},
    "experimental.distribute": {"ShardedIndependent": "experimental.distribute.Sharded of an Independent",
                                "ShardedSample": "experimental.distribute.Sharded of a Sample",
                                "distribute_lib": "tensorflow_probability.substrates.jax.internal",
                                "sharded.ShardedIndependent": "experimental.distribute.Sharded of an Independent",
                                "sharded.ShardedSample": "experimental.distribute.Sharded of a Sample"},
    "experimental.math": {"log_pade_4_4_newton": "jax.numpy.log",
                          "manual_special_functions.log_pade_4_4_newton": "jax.numpy.log"},
    "experimental.tangent_spaces.spaces": dict.fromkeys(("unit_basis", "unit_basis_on"), "a basis of your own"),
    "math": {"random_rademacher": "random.rademacher", "random_rayleigh": "random.rayleigh",
             "psd_kernels.positive_semidefinite_kernel.JAX_MODE": "nothing"},
    "mcmc.sample_halton_sequence": {"sample_halton_sequence": "mcmc.sample_halton_sequence"},
    "stats": dict.fromkeys(("iterative_mergesort", "lexicographical_indirect_sort",
                            "kendalls_tau.iterative_mergesort", "kendalls_tau.lexicographical_indirect_sort"),
                           "jax.numpy.lexsort"),
}  # fmt: skip
_NAMES |= {f"{_TFP}.{substrate}.{home}": names for substrate in ("jax", "numpy") for home, names in _TFP_NAMES.items()}

LIBRARY_NAMES = {f"{home}.{name}": today for home, names in _NAMES.items() for name, today in names.items()}
