"""Low-rank adapters: w + x_in @ x_out for a few matrices of each layer, whose two factors are all that learns.

The layer itself multiplies by both factors in turn (`shards/layer.py`); here is the global bookkeeping.
"""

import math

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.config.names import LAYERS
from shardformer.shards.parameters import LORA_IN as IN
from shardformer.shards.parameters import LORA_OUT as OUT


def is_adapter(name: str) -> bool:
    return name.endswith((IN, OUT))


def add_adapters(parameters: dict, config: Config, key) -> dict:
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


def select_learned(parameters: dict, config: Config) -> dict:
    """What gradients and the optimizer see: the adapters alone, if there are any."""
    if not config.lora_rank:
        return parameters
    return {LAYERS: {name: leaf for name, leaf in parameters[LAYERS].items() if is_adapter(name)}}


def remove_adapters(parameters: dict) -> dict:
    """The parameters without adapters."""
    return {
        module: {name: leaf for name, leaf in leaves.items() if not is_adapter(name)}
        for module, leaves in parameters.items()
    }


def replace_learned(parameters: dict, learned: dict) -> dict:
    """All parameters, with the new values of those that learn."""
    return {module: leaves | learned.get(module, {}) for module, leaves in parameters.items()}


def merge_adapters(leaves: dict, config: Config) -> dict:
    """{name: matrix} of one layer, or of all stacked, with the adapters added in and gone."""

    def whole(name, w):
        if f"{name}{IN}" not in leaves:
            return w
        return w + config.lora_alpha / config.lora_rank * (leaves[f"{name}{IN}"] @ leaves[f"{name}{OUT}"])

    return {name: whole(name, w) for name, w in leaves.items() if not is_adapter(name)}
