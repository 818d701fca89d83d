"""Low-rank adapters: w + x_in @ x_out for a few matrices of each layer, whose two factors are all that learns.

Split as their matrix is, the sum needs no collective: beside a column split the second factor has the same columns,
beside a row split the first has the same rows.
"""

import math

import jax
import jax.numpy as jnp

from shardformer.config import Config

LAYERS = "transformer/layers"
IN, OUT = "_lora_in", "_lora_out"


def is_adapter(name: str) -> bool:
    return name.endswith((IN, OUT))


def added(parameters: dict, config: Config, key) -> dict:
    """Stacked parameters with adapters that change nothing yet: their second factors are zero."""
    if not config.lora_rank:
        return parameters
    layers = dict(parameters[LAYERS])
    for target, own_key in zip(config.lora_names, jax.random.split(key, len(config.lora_names)), strict=True):
        L, inputs, outputs = layers[target].shape
        normal = jax.random.normal(own_key, (L, inputs, config.lora_rank), jnp.float32)
        layers[f"{target}{IN}"] = normal / math.sqrt(inputs)
        layers[f"{target}{OUT}"] = jnp.zeros((L, config.lora_rank, outputs), jnp.float32)
    return parameters | {LAYERS: layers}


def learned(parameters: dict, config: Config) -> dict:
    """What gradients and the optimizer see: the adapters alone, if there are any."""
    if not config.lora_rank:
        return parameters
    return {LAYERS: {name: leaf for name, leaf in parameters[LAYERS].items() if is_adapter(name)}}


def without(parameters: dict) -> dict:
    """The parameters that are no adapters."""
    return {
        module: {name: leaf for name, leaf in leaves.items() if not is_adapter(name)}
        for module, leaves in parameters.items()
    }


def with_learned(parameters: dict, learned: dict) -> dict:
    """All parameters, those that were learned in their new state."""
    return {module: leaves | learned.get(module, {}) for module, leaves in parameters.items()}


def merged(leaves: dict, config: Config) -> dict:
    """{name: matrix} of one layer, or of all stacked, with the adapters added in and gone."""

    def whole(name, w):
        if f"{name}{IN}" not in leaves:
            return w
        return w + config.lora_alpha / config.lora_rank * (leaves[f"{name}{IN}"] @ leaves[f"{name}{OUT}"])

    return {name: whole(name, w) for name, w in leaves.items() if not is_adapter(name)}
