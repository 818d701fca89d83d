"""`jax.sharding.PositionalSharding` over NamedSharding: an array of devices, one for each part of an array."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec


class PositionalSharding(NamedSharding):
    """The layout of an array with a position for each position of `devices`.

    The last position of `parts` has the devices with a copy of one part. `order` is that of the mesh.
    """

    parts: np.ndarray
    order: tuple[jax.Device, ...]

    def __new__(cls, devices: Sequence[jax.Device] | np.ndarray):
        parts = np.asarray(devices)[..., None]
        return _positional(parts, tuple(parts.ravel()))

    def __init__(self, devices):
        pass  # __new__ has created it

    @property
    def shape(self) -> tuple[int, ...]:
        return self.parts.shape[:-1]

    @property
    def ndim(self) -> int:
        return self.parts.ndim - 1

    def reshape(self, *shape: int | Sequence[int]) -> "PositionalSharding":
        sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], Sequence) else shape
        return _positional(self.parts.reshape(*sizes, self.parts.shape[-1]), self.order)

    def transpose(self, *axes: int) -> "PositionalSharding":
        order = axes or tuple(reversed(range(self.ndim)))
        return _positional(self.parts.transpose(*order, self.ndim), self.order)

    T = property(transpose)

    def replicate(self, axis: int | None = None, keepdims: bool = True) -> "PositionalSharding":
        """Returns the layout with one part along a position, or along all; each device there has a copy of it."""
        axes = range(self.ndim) if axis is None else [axis % self.ndim]
        retained = [each for each in range(self.ndim) if each not in axes]
        moved = self.parts.transpose(*retained, *axes, self.ndim)
        shape = [1 if each in axes else size for each, size in enumerate(self.shape) if keepdims or each not in axes]
        return _positional(moved.reshape(*shape, -1), self.order)


def _positional(parts: np.ndarray, order: tuple[jax.Device, ...]) -> PositionalSharding:
    mesh, spec = _over_halves(parts, order) or _over_positions(parts)
    created = NamedSharding.__new__(PositionalSharding, mesh, spec)  # type: ignore[call-arg]  # a class of C++
    NamedSharding.__init__(created, mesh, spec)
    created.parts, created.order = parts, order
    return created


def _over_halves(parts: np.ndarray, order: tuple[jax.Device, ...]) -> tuple[Mesh, PartitionSpec] | None:
    """Returns a mesh of axes of length 2 that keeps the order of the devices, for a power of 2 of them.

    A jit accepts arrays on two or more layouts of the same devices if their meshes have them in one order.
    """
    bits = len(order).bit_length() - 1
    if len(order) != 2**bits:
        return None
    number = {device: index for index, device in enumerate(order)}
    spec = []
    for axis, size in enumerate(parts.shape[:-1]):
        along = [number[device] for device in np.moveaxis(parts, axis, 0).reshape(size, -1)[:, 0]]
        steps = [2**bit for bit in reversed(range(size.bit_length() - 1))]
        # Index 2**bit of a position is one step along one axis of the mesh: layouts only reorder the bits.
        axes = [bits - (along[step] - along[0]).bit_length() for step in steps]
        spec.append(tuple(f"half {number}" for number in axes) or None)
    return Mesh(np.array(order).reshape([2] * bits), [f"half {number}" for number in range(bits)]), PartitionSpec(*spec)


def _over_positions(parts: np.ndarray) -> tuple[Mesh, PartitionSpec]:
    names = [f"position {number}" for number in range(parts.ndim - 1)]
    spec = [name if size > 1 else None for name, size in zip(names, parts.shape, strict=False)]
    return Mesh(parts, (*names, "copy")), PartitionSpec(*spec)
