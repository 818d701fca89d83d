"""`quantize_aware=`: float32 parameters with the values of codes, next to the masters that the optimizer updates.

A step computes its gradient at the rounded values and applies it to the masters, as if rounding had the derivative 1
(straight through).
"""

import jax.numpy as jnp

from shardformer.config import Config
from shardformer.parallel.replicas import map_named
from shardformer.quantized.quantized_weights import FORMS


def round_to_codes(parameters: dict, config: Config, step=None) -> dict:
    """Returns float32 parameters with the values that stored codes would stand for.

    step: that of a training state, which has float values before the first rounded step.
    """
    weights, first = FORMS[config.stored.quantize_aware](config), find_first_rounded(config)

    def round_leaf(name, leaf):
        if not weights.is_quantized(name):
            return leaf
        rounded = weights.dequantize(name, weights.quantize(name, leaf))
        return rounded if step is None else jnp.where(step < first, leaf, rounded)

    return map_named(round_leaf, parameters)


def find_first_rounded(config: Config) -> int:
    """Returns the number of steps after which parameters are rounded.

    Rounding from the first step on cost more than rounding a trained model: 0.46% of the loss in place of 0.15% (nf4).
    In the last quarter, in which the rate is small, the weights settle where their codes lose little.
    """
    given = config.stored.quantize_after
    return config.training.steps * 3 // 4 if given is None else given


def select_rounded(parameters: dict, config: Config) -> dict:
    """Returns the parameters (or their specs) that codes would store."""
    weights = FORMS[config.stored.quantize_aware](config)
    selected = {
        module: {name: leaf for name, leaf in leaves.items() if weights.is_quantized(f"{module}/{name}")}
        for module, leaves in parameters.items()
    }
    return {module: leaves for module, leaves in selected.items() if leaves}
