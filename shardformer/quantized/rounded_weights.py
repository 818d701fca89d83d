"""`quantize_aware=`: float32 parameters with the values of codes, next to the masters that the optimizer updates.

A step computes its gradient at the rounded values and applies it to the masters, as if rounding had the derivative 1
(straight through).
"""

import jax

from shardformer.config import Config
from shardformer.parallel.replicas import map_named
from shardformer.quantized.quantized_weights import FORMS


def round_to_codes(parameters: dict, config: Config, step) -> dict:
    """Returns float32 parameters with the values that codes would stand for, once `step` is one of the rounded steps.

    A conditional, as a step before them would spend time on values that it drops.
    """
    weights = FORMS[config.stored.quantize_aware](config)

    def round_leaf(name, leaf):
        return weights.dequantize(name, weights.quantize(name, leaf)) if weights.is_quantized(name) else leaf

    is_float = step < find_first_rounded(config)
    return jax.lax.cond(is_float, lambda: parameters, lambda: map_named(round_leaf, parameters))


def find_first_rounded(config: Config) -> int:
    """Returns the number of steps after which parameters are rounded.

    Rounding from the first step on cost more than rounding a trained model. In the last quarter, in which the rate is
    small, the weights settle where their codes lose little.
    """
    given = config.stored.quantize_after
    return config.training.steps * 3 // 4 if given is None else given


def describe_rounding(previous: Config | None, config: Config) -> str:
    """Returns a line that names the first rounded step and, if a resume or a branch moves it, the key that keeps it."""
    first = find_first_rounded(config)
    line = f"weights are rounded for quantize_aware={config.stored.quantize_aware} after step {first}"
    if previous is None or (before := find_first_rounded(previous)) == first:
        return line
    kept = f"; quantize_after={before} keeps it" if before <= config.training.steps else ""
    return f"{line}, and not after step {before} as before{kept}"


def select_rounded(parameters: dict, config: Config) -> dict:
    """Returns the parameters (or their specs) that codes would store."""
    weights = FORMS[config.stored.quantize_aware](config)
    selected = {
        module: {name: leaf for name, leaf in leaves.items() if weights.is_quantized(f"{module}/{name}")}
        for module, leaves in parameters.items()
    }
    return {module: leaves for module, leaves in selected.items() if leaves}
