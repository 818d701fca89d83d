"""The PartitionSpec of each parameter. Its name alone decides how mp and pp split it, never a shape or a value.

ZeRO splits over dp too, along a dimension that its size divides.
"""

import fnmatch

import jax
from jax.sharding import PartitionSpec as P

from shardformer.adapters.adapter_keys import is_adapter, split_factor
from shardformer.config import Config
from shardformer.config.names import BLOCKS, CODES, LORA_IN, LORA_OUT, SCALES, has_key_value_heads, is_stacked

# Split columns (outputs) or rows (inputs) of a matrix, as Megatron does. pp splits the leading L of stacked layers.
RULES = (
    ("*/layers/[qkv]", P(None, None, "mp")),
    ("*/layers/[qkv]_bias", P(None, "mp")),
    ("*/layers/[qk]_head_scale", P()),
    ("*/layers/[qk]_scale", P(None, "mp")),
    ("*/layers/sinks", P(None, "mp")),
    ("*/layers/q_latent", P()),
    ("*/layers/kv_latent", P()),
    ("*/layers/o", P(None, "mp", None)),
    ("*/layers/up", P(None, None, "mp")),
    ("*/layers/gate", P(None, None, "mp")),
    ("*/layers/up_bias", P(None, "mp")),
    ("*/layers/down", P(None, "mp", None)),
    ("*/layers/o_bias", P()),  # biases of row-parallel products are added once, after the sum
    ("*/layers/down_bias", P()),
    ("*/embed/tokens", P("mp", None)),
    ("*/embed/bias", P()),
    ("*/embed/previous", P(None, "mp", None)),
    ("*/embed/positions", P(None, "mp")),
    ("*/project", P()),  # between d_model and the width of the token table
    ("*/relative_bias/*", P(None, "mp")),  # of any position encoding: [rows, heads]
    ("*/head/w", P(None, "mp")),
    ("*/join/w", P(None, "mp")),  # of multi-token prediction
    ("*/head/bias", P("mp")),
    ("*/score/w", P()),  # of a reward model
    ("*norm/*", P()),
)


def parameter_spec(name: str, config: Config) -> P:
    """Returns the spec of one parameter by its full name ('transformer/layers/q')."""
    for suffix in (CODES, SCALES, BLOCKS):
        if name.endswith(suffix):
            matrix = name.removesuffix(suffix)
            from shardformer.quantized.part_keys import split_part  # not imported for float weights

            return P(*split_part(matrix, suffix, tuple(parameter_spec(matrix, config)), config))
    if is_adapter(name):
        matrix = name.removesuffix(LORA_IN).removesuffix(LORA_OUT)
        return P(*split_factor(name, tuple(parameter_spec(matrix, config))))
    for pattern, spec in list_rules(config):
        if fnmatch.fnmatchcase(name, pattern):
            if config.shares_kv_heads and has_key_value_heads(name):
                spec = P()
            if config.experts.experts:
                spec = _layout_of_experts().split_experts(name.rpartition("/")[2], spec, config)
            return P("pp", *spec[1:]) if config.parallel.pp > 1 and is_stacked(name) else spec
    raise KeyError(f"no rule in specs.py covers the parameter {name!r}; add one by name")


def list_rules(config: Config) -> tuple[tuple[str, P], ...]:
    """Returns the pairs of a pattern and the spec of a configuration's parameters."""
    return (*RULES, *_layout_of_experts().RULES) if config.experts.experts else RULES


def _layout_of_experts():
    from shardformer.experts import expert_layout  # not imported without experts

    return expert_layout


def parameter_specs(parameters, config: Config):
    """Returns the specs of a Haiku parameter tree {module: {name: array}}."""
    return {
        module: {name: parameter_spec(f"{module}/{name}", config) for name in leaves}
        for module, leaves in parameters.items()
    }


def zero_dimensions(parameters, specs, config: Config):
    """Returns, for each parameter, the dimension that ZeRO splits over dp besides those of its spec.

    None without ZeRO or replicas, or if no dimension divides.
    """
    return {
        module: {
            name: _zero_dimension(f"{module}/{name}", leaf, specs[module][name], config)
            for name, leaf in leaves.items()
        }
        for module, leaves in parameters.items()
    }


def _zero_dimension(name: str, leaf, spec: P, config: Config) -> int | None:
    """Chooses a dimension other than the leading L of stacked layers, along which a scan slices.

    Prefers parts that are whole tiles of a TPU (8 rows, 128 columns), because its compiler all-reduces other
    gradients; then a dimension without mp.
    """
    if not config.parallel.zero or config.parallel.replicas == 1:
        return None
    axes_of = (*spec, *[None] * leaf.ndim)[: leaf.ndim]
    if any(isinstance(axes, tuple) for axes in axes_of):
        return None  # dp splits it already

    def parts(dimension: int) -> int:
        return config.parallel.replicas * (config.parallel.mp if axes_of[dimension] else 1)

    def rank(dimension: int) -> tuple[bool, int]:
        tile = 128 if dimension == leaf.ndim - 1 else 8
        return leaf.shape[dimension] % (parts(dimension) * tile) != 0, parts(dimension)

    first = 1 if is_stacked(name) else 0
    fitting = [dimension for dimension in range(first, leaf.ndim) if leaf.shape[dimension] % parts(dimension) == 0]
    return min(fitting, key=rank, default=None)


def split_over_dp(specs, dimensions, config: Config):
    """Adds dp (dp and cp, if the context is split) to the specs, along the dimensions of `zero_dimensions`."""
    axes = ("dp", "cp") if config.parallel.cp > 1 else ("dp",)
    return {
        module: {name: _add_axes(spec, dimensions[module][name], axes) for name, spec in leaves.items()}
        for module, leaves in specs.items()
    }


def _add_axes(spec: P, dimension: int | None, added: tuple[str, ...]) -> P:
    if dimension is None:
        return spec
    axes = [*spec, *[None] * (dimension + 1 - len(spec))]
    # mp comes first: the parts of one shard of mp are contiguous, so that a gather over dp restores that shard.
    together = added if axes[dimension] is None else (axes[dimension], *added)
    axes[dimension] = together if len(together) > 1 else together[0]
    return P(*axes)


def count_parameters(parameters) -> int:
    """Counts the scalars of all arrays."""
    return sum(leaf.size for leaf in jax.tree.leaves(parameters))
