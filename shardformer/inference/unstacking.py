"""The parameters for decoding: the arrays of each layer by themselves."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.config.names import is_factor_of_product
from shardformer.devices import programs
from shardformer.model import Model
from shardformer.shards.parameters import map_stacked


class Unstacking:
    """The function from a model's parameters to those for `Decoder.decode`.

    From a stacked array XLA would copy each layer's part for every token.
    """

    def __init__(self, model: Model):
        self._model = model
        self._take = functools.cache(self._make_program)

    def __call__(self, params: dict, donate: bool = False) -> dict:
        """Returns each layer's arrays in a list, in the dtype of the products; the other arrays are the given ones.

        donate: delete each stacked array when its layers exist, so that only one array is in memory twice.
        """

        def unstack(module, name, leaf):
            config = self._model.config
            dtype = jnp.dtype(config.parallel.dtype) if is_factor_of_product(name) else leaf.dtype
            take = self._take(P(*self._model.specs[module][name][1:]), dtype)
            layers = [take(leaf, np.int32(i)) for i in range(len(config.layers_of(name)))]
            if donate:
                jax.block_until_ready(layers)
                leaf.delete()
            return layers

        return {module: map_stacked(functools.partial(unstack, module), {module: leaves})[module]
                for module, leaves in params.items()}  # fmt: skip

    def _make_program(self, spec: P, dtype: Any):
        def take_layer(stack, i):
            return lax.dynamic_index_in_dim(stack, i, keepdims=False).astype(dtype)

        return programs.jit(take_layer, out_shardings=self._model.sharding(spec))
