"""Quantised parameters over the replicas of data parallelism; ZeRO gathers codes and scales as stored. Shard view."""

import dataclasses

from jax import Array, lax

from shardformer.config.names import CODES, SCALES
from shardformer.kernels.quantized import Int8Matrix
from shardformer.parallel.replicas import ForwardZero
from shardformer.parallel.scattering import Scattering


@dataclasses.dataclass(frozen=True)
class QuantizedReplicas(ForwardZero):
    """Replicated parameters, or ZeRO's parts of them, of which each matrix is gathered as one `Int8Matrix`."""

    def for_forward_pass(self) -> "QuantizedReplicas":
        return self

    def gather_outside(self, params: dict) -> dict:
        return join_matrices(super().gather_outside(params))

    def gather_layer(self, stored: dict) -> dict:
        return join_matrices(super().gather_layer(stored))

    def gather(self, name: str, p: Array, dimension: int | None, scattering: Scattering) -> Array:
        """Returns a parameter of which every replica has a part along `dimension`; codes stay int8."""
        if dimension is None or not name.endswith((CODES, SCALES)):
            return super().gather(name, p, dimension, scattering)
        return lax.all_gather(p, self.layer_axes, axis=dimension, tiled=True, to="invarying")


def join_matrices(params: dict) -> dict:
    """Returns the parameters with one matrix instead of its codes and scales."""
    joined: dict = {module: {} for module in params}
    for module, leaves in params.items():
        for name, leaf in leaves.items():
            if name.endswith(CODES):
                base = name.removesuffix(CODES)
                joined[module][base] = Int8Matrix(leaf, leaves[f"{base}{SCALES}"])
            elif not name.endswith(SCALES):
                joined[module][name] = leaf
    return joined
