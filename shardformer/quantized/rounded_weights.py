"""`quantize_aware=`: float32 parameters with the values of codes, next to the masters that the optimizer updates.

A step computes its gradient at the rounded values and applies it to the masters, as if rounding had the derivative 1
(straight through).
"""

from shardformer.config import Config
from shardformer.parallel.replicas import map_named
from shardformer.quantized.quantized_weights import FORMS


def round_to_codes(parameters: dict, config: Config) -> dict:
    """Returns float32 parameters with the values that stored codes would stand for."""
    weights = FORMS[config.stored.quantize_aware](config)

    def round_leaf(name, leaf):
        return weights.dequantize(name, weights.quantize(name, leaf)) if weights.is_quantized(name) else leaf

    return map_named(round_leaf, parameters)


def select_rounded(parameters: dict, config: Config) -> dict:
    """Returns the parameters (or their specs) that codes would store."""
    weights = FORMS[config.stored.quantize_aware](config)
    selected = {
        module: {name: leaf for name, leaf in leaves.items() if weights.is_quantized(f"{module}/{name}")}
        for module, leaves in parameters.items()
    }
    return {module: leaves for module, leaves in selected.items() if leaves}
