"""Low-rank adapters: w + lora_in @ lora_out for some matrices of each layer; only the two factors are trained.

`adapter_layer.py` multiplies by the factors; this module has the functions of the global parameter tree.
"""

import math

import jax
import jax.numpy as jnp

from shardformer.adapters.adapter_keys import is_adapter, replace_trainable, select_trainable
from shardformer.config import Config
from shardformer.config.names import LAYERS
from shardformer.config.names import LORA_IN as IN
from shardformer.config.names import LORA_OUT as OUT


class TrainableAdapters:
    """The trainable parameters of a model with adapters: only the adapters."""

    def __init__(self, config: Config):
        self._config = config

    def select(self, params: dict) -> dict:
        """Returns the trainable parameters (or their specs, shapes or gradients)."""
        return select_trainable(params, self._config)

    def replace(self, params: dict, new: dict) -> dict:
        """Returns all parameters, with new values for the trainable ones."""
        return replace_trainable(params, new)

    def add(self, params: dict, key) -> dict:
        """Returns the parameters with adapters drawn from a key."""
        return add_adapters(params, self._config, key)


def add_adapters(parameters: dict, config: Config, key) -> dict:
    """Adds adapters to stacked parameters. Their second factors are zero, so that the model is unchanged."""
    layers = dict(parameters[LAYERS])
    for target, local_key in zip(
        config.lora.lora_names, jax.random.split(key, len(config.lora.lora_names)), strict=True
    ):
        *stacked, inputs, outputs = layers[target].shape  # layers, and the experts of a layer
        rank = config.lora.adapters[target].rank
        normal = jax.random.normal(local_key, (*stacked, inputs, rank), jnp.float32)
        layers[f"{target}{IN}"] = normal / math.sqrt(inputs)
        layers[f"{target}{OUT}"] = jnp.zeros((*stacked, rank, outputs), jnp.float32)
    return parameters | {LAYERS: layers}


def merge_adapters(leaves: dict, config: Config) -> dict:
    """Adds the adapters to their matrices, in the leaves {name: array} of one layer or of stacked layers."""

    def merge(name, w):
        if f"{name}{IN}" not in leaves:
            return w
        return w + config.lora.adapter_scale(name) * (leaves[f"{name}{IN}"] @ leaves[f"{name}{OUT}"])

    return {name: merge(name, w) for name, w in leaves.items() if not is_adapter(name)}
