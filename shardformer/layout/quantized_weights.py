"""`weights=int8`: a matrix is stored as two parameters, NAME_codes and NAME_scales, split as the matrix is."""

from collections.abc import Callable

import jax

from shardformer.config.names import CODES, EXPERT_MATRICES, MATRICES, SCALES, SHARED_MATRICES, is_stacked
from shardformer.kernels import quantized
from shardformer.layout.float_weights import FloatWeights
from shardformer.parallel.replicas import Replicated, map_named
from shardformer.parallel.stored_replicas import QuantizedReplicas

OF_LAYERS = {*MATRICES, *SHARED_MATRICES, *EXPERT_MATRICES}


class QuantizedWeights(FloatWeights):
    """The layers' matrices, the token table and the untied head as int8 codes and scales."""

    multiply_table: Callable = staticmethod(quantized.multiply_table)

    def is_quantized(self, name: str) -> bool:
        """Returns whether the parameter of this full name is stored as codes and scales."""
        module, _, leaf = name.rpartition("/")
        return leaf in OF_LAYERS if is_stacked(module) else name.endswith(("/embed/tokens", "/head/w"))

    def store(self, params: dict) -> dict:
        """Returns the parameters (or, from their shapes, the shapes) with the codes and scales of each matrix."""
        is_shape = any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(params))
        return jax.eval_shape(self._store, params) if is_shape else self._store(params)

    def quantize(self, name: str, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the codes and the scales of the parameter of this full name."""
        return quantized.quantize(w, axis=-1 if name.endswith("/tokens") else -2)

    def name_parts(self, params: dict) -> dict:
        """Returns the stored form of parameters in which each matrix is a pair of codes and scales."""
        stored: dict = {module: {} for module in params}
        for module, leaves in params.items():
            for name, leaf in leaves.items():
                names = [f"{name}{CODES}", f"{name}{SCALES}"] if self.is_quantized(f"{module}/{name}") else [name]
                stored[module] |= dict(zip(names, leaf if len(names) == 2 else [leaf], strict=True))
        return stored

    def _store(self, params: dict) -> dict:
        def quantize(name, leaf):
            return self.quantize(name, leaf) if self.is_quantized(name) else leaf

        return self.name_parts(map_named(quantize, params))


def make_replicas(replicas: Replicated) -> QuantizedReplicas:
    """Returns replicas on the same mesh axes that gather codes and scales as they are stored."""
    dtype = getattr(replicas, "dtype", "float32")
    axes = replicas.layer_axes, replicas.outside_axes, replicas.count, replicas.shared_by_dp
    return QuantizedReplicas(*axes, dtype)
