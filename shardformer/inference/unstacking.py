"""The parameters for decoding: the arrays of each layer by themselves."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.config.names import is_factor_of_product
from shardformer.devices import programs
from shardformer.model import Model, with_shardings
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
            take = self._find_program(module, name, leaf)
            layers = [take(leaf, np.int32(i)) for i in range(self._count_layers(name))]
            if donate:
                jax.block_until_ready(layers)
                leaf.delete()
            return layers

        return _map_modules(unstack, params)

    def lower(self, params: dict) -> tuple[list[jax.stages.Lowered], dict]:
        """Returns the programs for parameters of these shapes and shardings, and what they return for all of them."""
        programs_of_leaves = []

        def unstack(module, name, leaf):
            lowered = self._find_program(module, name, leaf).lower(leaf, np.int32(0))
            programs_of_leaves.append(lowered)
            layer = with_shardings(lowered.out_info, self._model.sharding(self._find_spec(module, name)))
            return [layer] * self._count_layers(name)

        return programs_of_leaves, _map_modules(unstack, params)

    def _count_layers(self, name: str) -> int:
        return len(self._model.config.mixture.layers_of(name))

    def _find_spec(self, module: str, name: str) -> P:
        return P(*self._model.specs[module][name][1:])

    def _find_program(self, module: str, name: str, leaf):
        dtype = jnp.dtype(self._model.config.parallel.dtype) if is_factor_of_product(name) else leaf.dtype
        return self._take(self._find_spec(module, name), dtype)

    def _make_program(self, spec: P, dtype: Any):
        def take_layer(stack, i):
            return lax.dynamic_index_in_dim(stack, i, keepdims=False).astype(dtype)

        return programs.jit(take_layer, out_shardings=self._model.sharding(spec))


def _map_modules(function: Callable, params: dict) -> dict:
    """Replaces each leaf of the layers by function(module, name, leaf)."""
    return {
        module: map_stacked(functools.partial(function, module), {module: leaves})[module]
        for module, leaves in params.items()
    }
