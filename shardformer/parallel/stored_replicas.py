"""Quantised parameters over the replicas of data parallelism; ZeRO gathers codes and scales as stored. Shard view."""

import dataclasses
from collections.abc import Callable

from jax import Array, lax

from shardformer.config.names import BLOCKS, CODES, SCALES, is_part
from shardformer.parallel.replicas import ForwardZero, Replicated, Zero, Zero1, Zero3
from shardformer.parallel.scattering import Scattering, gather_parts

PARTS = (CODES, SCALES, BLOCKS)


@dataclasses.dataclass(frozen=True)
class Stored(Replicated):
    """Replicas that join each matrix from its stored parts. The parts are gathered as stored and have no gradient."""

    join: Callable | None = None  # of (full name of a matrix, its parts)

    def gather_outside(self, params: dict) -> dict:
        return self._join_all(super().gather_outside(params))

    def gather_layer(self, stored: dict) -> dict:
        return self._join_all(super().gather_layer(stored))

    def gather(self, name: str, p: Array, dimension: int | None, scattering: Scattering) -> Array:
        """Returns a parameter of which every replica has a part along `dimension`."""
        if dimension is None or not is_part(name):
            return super().gather(name, p, dimension, scattering)  # type: ignore[misc]  # of ZeRO
        return self._gather_part(p, dimension, scattering)

    def _gather_part(self, p: Array, dimension: int, scattering: Scattering) -> Array:
        return gather_parts(p, dimension, scattering.stages, self.layer_axes)

    def _join_all(self, params: dict) -> dict:
        """Returns the parameters with one matrix instead of its parts."""
        joined: dict = {module: {} for module in params}
        for module, leaves in params.items():
            for name, leaf in leaves.items():
                if name.endswith(CODES):
                    base = name.removesuffix(CODES)
                    parts = tuple(leaves[part] for suffix in PARTS if (part := f"{base}{suffix}") in leaves)
                    joined[module][base] = self.join(f"{module}/{base}", parts)  # type: ignore[misc]  # it is given
                elif not is_part(name):
                    joined[module][name] = leaf
        return joined


@dataclasses.dataclass(frozen=True)
class StoredZero(Stored, Zero):
    """ZeRO's parts of stored parameters."""

    def for_forward_pass(self) -> "StoredForwardZero":
        return StoredForwardZero(**_fields(self))


@dataclasses.dataclass(frozen=True)
class StoredZero1(StoredZero, Zero1):
    """ZeRO-1 of stored parameters."""


@dataclasses.dataclass(frozen=True)
class StoredZero3(StoredZero, Zero3):
    """ZeRO-3 of stored parameters."""


@dataclasses.dataclass(frozen=True)
class StoredForwardZero(StoredZero, ForwardZero):
    """ZeRO in forward passes without gradients."""

    def _gather_part(self, p: Array, dimension: int, scattering: Scattering) -> Array:
        return lax.all_gather(p, self.layer_axes, axis=dimension, tiled=True, to="invarying")


def add_join(replicas: Replicated, join: Callable) -> Stored:
    """Returns the same replicas, which join the parts of a matrix by this function."""
    kind = {Replicated: Stored, Zero1: StoredZero1, Zero3: StoredZero3}[type(replicas)]
    return kind(**_fields(replicas), join=join)


def _fields(replicas: Replicated) -> dict:
    return {field.name: getattr(replicas, field.name) for field in dataclasses.fields(replicas)}
