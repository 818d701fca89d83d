"""Arrays of all devices of a mesh at once, and the collectives between them.

Inside a shard_map, an array has the mesh's axes before its own: [*mesh, *shape]. A mesh axis has size 1 where all
devices along it have the same values, so that NumPy's broadcasting computes and stores them once:

    mesh dp=4 mp=2                  on one device     of all devices
    a batch, split over dp          [B, T, D]         [4, 1, B, T, D]
    a matrix, split over mp         [D, f]            [1, 2, D, f]
    their product                   [B, T, f]         [4, 2, B, T, f]
    a psum of products over mp      [B, T, D]         [4, 1, B, T, D]

`rank` is the number of an array's own axes, the last ones. Only the functions of this file change mesh axes.
"""

import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np
from numpy import ndarray

Mesh = dict[str, int]  # name -> devices, in the order of the arrays' first axes


def split(x: ndarray, rank: int, spec: Iterable, mesh: Mesh) -> ndarray:
    """Returns each device's block of a full array, by the PartitionSpec of the array's own axes."""
    outer, entries = x.ndim - rank, _entries(spec, rank)
    shape, sources = list(x.shape[:outer]), {}
    for size, names in zip(x.shape[outer:], entries, strict=True):
        for name in names:
            sources[name] = len(shape)
            shape.append(mesh[name])
        shape.append(size // math.prod(mesh[name] for name in names))
    x = x.reshape(shape)
    used = set(sources.values())
    own = [axis for axis in range(outer, len(shape)) if axis not in used]
    order = [*range(outer), *(sources[name] for name in mesh if name in sources), *own]
    x = x.transpose(order)
    absent = [outer + i for i, name in enumerate(mesh) if name not in sources]
    return np.expand_dims(x, tuple(absent))


def join(x: ndarray, rank: int, spec: Iterable, mesh: Mesh) -> ndarray:
    """Returns the full array of blocks. Along an axis that the spec omits, device 0 has the result."""
    outer, entries = x.ndim - rank - len(mesh), _entries(spec, rank)
    named = {name for names in entries for name in names}
    take = tuple(slice(None) if name in named else 0 for name in mesh)
    x = x[(slice(None),) * outer + take]
    present = [name for name in mesh if name in named]
    full = (*x.shape[:outer], *(mesh[name] for name in present), *x.shape[outer + len(present) :])
    x = np.broadcast_to(x, full)
    order, shape = list(range(outer)), list(x.shape[:outer])
    for i, names in enumerate(entries):
        axis = outer + len(present) + i
        order += [*(outer + present.index(name) for name in names), axis]
        shape.append(x.shape[axis] * math.prod(mesh[name] for name in names))
    return x.transpose(order).reshape(shape)


def find_differing(x: ndarray, rank: int, spec: Iterable, mesh: Mesh) -> dict[str, float]:
    """Returns {axis: largest difference} for the axes that the spec omits and along which devices differ."""
    outer = x.ndim - rank - len(mesh)
    named = {name for names in _entries(spec, rank) for name in names}
    result = {}
    for i, name in enumerate(mesh):
        if name in named or x.shape[outer + i] == 1:
            continue
        first = x.take([0], outer + i)
        if not np.array_equal(np.broadcast_to(first, x.shape), x, equal_nan=x.dtype.kind in "fc"):
            with np.errstate(invalid="ignore"):
                result[name] = float(np.nanmax(np.abs(np.subtract(x, first, dtype=_difference_dtype(x)))))
    return result


def _difference_dtype(x: ndarray):
    return x.dtype if x.dtype.kind in "fc" else np.float64


def _entries(spec: Iterable, rank: int) -> list[tuple[str, ...]]:
    """Returns the names of mesh axes of each axis of an array."""
    entries = list(spec)
    entries += [None] * (rank - len(entries))
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


class Collectives:
    """The collectives over some of the mesh axes around an operation, whose arrays have `len(mesh)` first axes.

    `groups` are of indices along these axes; None: all devices of the axes are one group.
    """

    def __init__(self, mesh: Mesh, names: Sequence[str], groups: Sequence[Sequence[int]] | None = None):
        self._names = tuple(names)
        self._axes = tuple(list(mesh).index(name) for name in names)
        self._sizes = tuple(mesh[name] for name in names)
        self._mesh, self._count, self._groups = mesh, math.prod(self._sizes), groups

    def index(self) -> ndarray:
        """Returns each device's index along the axes, the last of which counts fastest."""
        shape = [1] * len(self._mesh)
        for axis, size in zip(self._axes, self._sizes, strict=True):
            shape[axis] = size
        counted = np.arange(self._count, dtype=np.int32).reshape(self._sizes)
        return counted.transpose(np.argsort(self._axes)).reshape(shape)

    def reduce(self, x: ndarray, ufunc: np.ufunc) -> ndarray:
        """Combines the devices' arrays; the result is the same on all devices of a group."""
        if self._groups is not None:
            return self._share(x, lambda parts: ufunc.reduce(parts, axis=0, dtype=x.dtype))
        copies = math.prod(size for axis, size in zip(self._axes, self._sizes, strict=True) if x.shape[axis] == 1)
        total = ufunc.reduce(x, axis=self._axes, keepdims=True, dtype=x.dtype)
        return total * np.asarray(copies, x.dtype) if ufunc is np.add and copies > 1 else total

    def gather(self, x: ndarray, axis: int, tiled: bool) -> ndarray:
        """Stacks, or with `tiled` joins, the devices' arrays along `axis` of the result's own axes."""
        at = len(self._mesh) + axis

        def stack(parts: ndarray) -> ndarray:
            lined_up = np.moveaxis(parts, 0, at)
            return _merge(lined_up, at) if tiled else lined_up

        return self._share(x, stack)

    def reduce_scatter(self, x: ndarray, axis: int, tiled: bool) -> ndarray:
        """Gives each device its part along `axis` of the sum of the devices' arrays."""
        at = len(self._mesh) + axis

        def cut(total: ndarray, members: int) -> ndarray:
            parts = total.reshape((*total.shape[:at], members, -1, *total.shape[at + 1 :]))
            parts = np.moveaxis(parts, at, 0)  # [members, *mesh, *shape]
            return parts if tiled else parts.squeeze(at + 1)

        if self._groups is None:
            return self._hand_out(cut(self.reduce(x, np.add), self._count))
        return self._exchange(x, lambda parts: cut(parts.sum(0, dtype=x.dtype), len(parts)))

    def permute(self, x: ndarray, pairs: Sequence[tuple[int, int]]) -> ndarray:
        """Sends each device's array along the (sender, receiver) pairs; other receivers get zeros."""
        # JAX counts the devices of a ppermute, unlike those of other collectives, in the order of the mesh's axes.
        in_order = tuple(name for name in self._mesh if name in self._names)
        if self._names != in_order:
            return Collectives(self._mesh, in_order).permute(x, pairs)

        def send(parts: ndarray) -> ndarray:
            received = np.zeros_like(parts)
            for sender, receiver in pairs:
                received[receiver] = parts[sender]
            return received

        return self._exchange(x, send)

    def all_to_all(self, x: ndarray, split_axis: int, concat_axis: int) -> ndarray:
        """Gives device i part i of each device's array along `split_axis`; it joins them along `concat_axis`.

        JAX itself adds and removes the axes of size 1 that make a stack of it (`tiled=False`).
        """
        k = len(self._mesh)

        def send(parts: ndarray) -> ndarray:
            at = 1 + k + split_axis
            sent = parts.reshape((*parts.shape[:at], len(parts), -1, *parts.shape[at + 1 :]))
            sent = np.moveaxis(sent, at, 0)  # [receivers, senders, *mesh, *shape]
            return _merge(np.moveaxis(sent, 1, 1 + k + concat_axis), 1 + k + concat_axis)

        return self._exchange(x, send)

    def _share(self, x: ndarray, function: Callable[[ndarray], ndarray]) -> ndarray:
        """Returns function([members, *mesh, *shape]) on all members of each group."""
        if self._groups is None:
            return function(self._line_up(x))
        return self._exchange(x, lambda parts: np.stack([function(parts)] * len(parts)))

    def _exchange(self, x: ndarray, function: Callable[[ndarray], ndarray]) -> ndarray:
        """Returns to each member of a group its part of function([members, *mesh, *shape])."""
        sent = self._line_up(x)
        if self._groups is None:
            return self._hand_out(function(sent))
        results = [function(sent[list(group)]) for group in self._groups]
        received = np.empty((self._count, *results[0].shape[1:]), x.dtype)
        for group, result in zip(self._groups, results, strict=True):
            received[list(group)] = result
        return self._hand_out(received)

    def _line_up(self, x: ndarray) -> ndarray:
        """Returns [devices of the axes, *mesh, *shape], where these mesh axes have size 1."""
        full = list(x.shape)
        for axis, size in zip(self._axes, self._sizes, strict=True):
            full[axis] = size
        moved = np.moveaxis(np.broadcast_to(x, full), self._axes, range(len(self._axes)))
        rest = moved.shape[len(self._axes) :]
        return np.expand_dims(moved.reshape(self._count, *rest), tuple(1 + axis for axis in sorted(self._axes)))

    def _hand_out(self, received: ndarray) -> ndarray:
        """Returns [*mesh, *shape] of [devices of the axes, *mesh, *shape], where these mesh axes have size 1."""
        rest = received.squeeze(tuple(1 + axis for axis in self._axes))
        return np.moveaxis(rest.reshape((*self._sizes, *rest.shape[1:])), range(len(self._axes)), self._axes)


def _merge(x: ndarray, axis: int) -> ndarray:
    """Joins an axis with the next one."""
    return x.reshape((*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]))
