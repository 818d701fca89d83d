"""Operations that move elements: reshaping, slices, gathers and scatters."""

import itertools
from collections.abc import Iterator

import numpy as np
from numpy import ndarray

from shardformer.exact.operations import Operation, is_float, own_axes, rule, share_prefix, working_dtype


@rule("reshape")
def reshape(operation: Operation, x, *dynamic_sizes):
    if (order := operation.params.get("dimensions")) is not None:
        x = _transpose(operation, x, order)
    return x.reshape((*operation.prefix(x), *operation.shape))


@rule("squeeze")
def squeeze(operation: Operation, x):
    return x.reshape((*operation.prefix(x), *operation.shape))


@rule("broadcast_in_dim")
def broadcast(operation: Operation, x, *dynamic_sizes):
    shape = [1] * len(operation.shape)
    for axis, size in zip(operation.params["broadcast_dimensions"], operation.inputs[0].shape, strict=True):
        shape[axis] = size
    prefix = operation.prefix(x)
    return np.broadcast_to(x.reshape((*prefix, *shape)), (*prefix, *operation.shape))


@rule("transpose")
def transpose(operation: Operation, x):
    return _transpose(operation, x, operation.params["permutation"])


def _transpose(operation: Operation, x: ndarray, order) -> ndarray:
    k = len(operation.mesh)
    return x.transpose(*range(k), *(k + axis for axis in order))


@rule("rev")
def reverse(operation: Operation, x):
    return np.flip(x, own_axes(len(operation.shape), operation.params["dimensions"]))


@rule("concatenate")
def concatenate(operation: Operation, *arrays):
    axis = operation.params["dimension"] - len(operation.shape)
    return np.concatenate(share_prefix(operation, arrays), axis)


@rule("stack")
def stack(operation: Operation, *arrays):
    axis = operation.params["axis"] - len(operation.shape)
    return np.stack(share_prefix(operation, arrays), axis)


@rule("split")
def split(operation: Operation, x):
    rank = len(operation.inputs[0].shape)
    return tuple(np.split(x, np.cumsum(operation.params["sizes"])[:-1], operation.params["axis"] - rank))


@rule("unstack")
def unstack(operation: Operation, x):
    return tuple(np.moveaxis(x, operation.params.get("axis", 0) - len(operation.inputs[0].shape), 0))


@rule("tile")
def tile(operation: Operation, x):
    return np.tile(x, operation.params["reps"])


@rule("slice")
def slice_array(operation: Operation, x):
    p = operation.params
    strides = p["strides"] or [1] * len(p["start_indices"])
    return x[(..., *map(slice, p["start_indices"], p["limit_indices"], strides))]


@rule("pad")
def pad(operation: Operation, x, value):
    value = value.reshape((*operation.prefix(value), *[1] * len(operation.shape)))
    return pad_array(x, value, operation.params["padding_config"])


def pad_array(x: ndarray, value, config) -> ndarray:
    """Pads the last axes by (before, after, between elements); negative numbers before and after cut."""
    k = x.ndim - len(config)
    prefix, shape = np.broadcast_shapes(x.shape[:k], np.shape(value)[:k]), []
    source, target = [slice(None)] * k, [slice(None)] * k
    for (low, high, interior), size in zip(config, x.shape[k:], strict=True):
        step = interior + 1
        full = low + high + max((size - 1) * step + 1, 0)
        first = max(0, -(low // step)) if low < 0 else 0  # the first element that is not cut off
        last = max(min(size, (full - 1 - low) // step + 1), first)
        shape.append(full)
        source.append(slice(first, last))
        start = low + first * step
        target.append(slice(start, start + (last - first - 1) * step + 1, step) if last > first else slice(0, 0))
    result = np.empty((*prefix, *shape), x.dtype)
    result[...] = value
    result[tuple(target)] = x[tuple(source)]
    return result


def pad_windows(x: ndarray, padding, dilation, value) -> ndarray:
    """Pads the last axes of the input of windows, and puts `dilation - 1` elements between its own."""
    config = [(low, high, between - 1) for (low, high), between in zip(padding, dilation, strict=True)]
    return pad_array(x, value, config)


def list_windows(x: ndarray, window, strides, dilation, counts) -> Iterator[tuple[tuple[int, ...], ndarray]]:
    """Yields each position in a window, and the elements there of all windows: [..., *counts]."""
    for at in itertools.product(*map(range, window)):
        starts = [i * step for i, step in zip(at, dilation, strict=True)]
        parts = zip(starts, strides, counts, strict=True)
        own: list = [slice(start, start + stride * count, stride) for start, stride, count in parts]
        yield at, x[(..., *own)]


# Positions that differ between devices: index arrays have the mesh axes too.


def _mesh_indices(operation: Operation, sizes: tuple[int, ...], rank: int) -> list[ndarray]:
    """Returns an index of each mesh axis, to be combined with index arrays of `rank` further axes."""
    k = len(operation.mesh)
    return [
        np.arange(size).reshape([-1 if i == axis else 1 for i in range(k + rank)]) for axis, size in enumerate(sizes)
    ]


def _window_indices(starts, sizes: tuple[int, ...], limits: tuple[int, ...]) -> list[ndarray]:
    """Returns an index array for each axis of windows that start at `starts` and are moved inside the limits."""
    rank, result = len(sizes), []
    for axis, (start, size, limit) in enumerate(zip(starts, sizes, limits, strict=True)):
        first = np.clip(start.astype(np.int64), 0, limit - size)
        offsets = np.arange(size).reshape([-1 if i == axis else 1 for i in range(rank)])
        result.append(first.reshape((*first.shape, *[1] * rank)) + offsets)
    return result


@rule("dynamic_slice")
def dynamic_slice(operation: Operation, x, *starts):
    sizes, rank = operation.params["slice_sizes"], len(operation.shape)
    if all(start.size == 1 for start in starts):
        limits = zip(starts, sizes, operation.inputs[0].shape, strict=True)
        firsts = [int(np.clip(int(start.item()), 0, limit - size)) for start, size, limit in limits]
        return x[(..., *(slice(first, first + size) for first, size in zip(firsts, sizes, strict=True)))]
    prefix = np.broadcast_shapes(operation.prefix(x), *(start.shape for start in starts))
    x = np.broadcast_to(x, (*prefix, *operation.inputs[0].shape))
    windows = _window_indices(starts, sizes, operation.inputs[0].shape)
    return x[(*_mesh_indices(operation, prefix, rank), *windows)]


@rule("dynamic_update_slice")
def dynamic_update_slice(operation: Operation, x, update, *starts):
    rank, sizes = len(operation.shape), operation.inputs[1].shape
    prefix = np.broadcast_shapes(operation.prefix(x), operation.prefix(update), *(start.shape for start in starts))
    result = np.broadcast_to(x, (*prefix, *operation.shape)).copy()
    windows = _window_indices(starts, sizes, operation.shape)
    result[(*_mesh_indices(operation, prefix, rank), *windows)] = update
    return result


def _is_clipped(mode) -> bool:
    return "CLIP" in str(mode).upper() or "PROMISE" in str(mode).upper()


class _Windows:
    """The windows of a gather or a scatter in an operand: [*mesh, *index batch, *window]."""

    def __init__(self, operation, operand_shape, indices, sizes, start_map, window_axes, batching, clipped):
        """`sizes` are the window's sizes in each axis of the operand; `window_axes` those that the update has too."""
        k, batch_rank = len(operation.mesh), len(indices.shape) - len(operation.mesh) - 1
        window_rank = len(window_axes)
        self.positions, self.inside = [], np.True_
        operand_batching, index_batching = batching
        for axis, (size, limit) in enumerate(zip(sizes, operand_shape, strict=True)):
            if axis in start_map:
                start = indices[..., start_map.index(axis)].astype(np.int64)
                fits = (start >= 0) & (start + size <= limit)
                self.inside = self.inside & fits
                start = np.clip(start, 0, max(limit - size, 0))
            elif axis in operand_batching:
                along = index_batching[operand_batching.index(axis)]
                start = np.arange(limit).reshape([-1 if i == k + along else 1 for i in range(k + batch_rank)])
            else:
                start = np.zeros([1] * (k + batch_rank), np.int64)
            position = start.reshape((*start.shape, *[1] * window_rank))
            if axis in window_axes:
                at = window_axes.index(axis)
                position = position + np.arange(size).reshape([-1 if i == at else 1 for i in range(window_rank)])
            self.positions.append(position)
        if clipped:
            self.inside = np.True_
        self.inside = np.asarray(self.inside)
        if self.inside.ndim:
            self.inside = self.inside.reshape((*self.inside.shape, *[1] * window_rank))


@rule("gather")
def gather(operation: Operation, x, indices):
    p, k = operation.params, len(operation.mesh)
    numbers, shape = p["dimension_numbers"], operation.inputs[0].shape
    left_out = {*numbers.collapsed_slice_dims, *numbers.operand_batching_dims}
    window_axes = [axis for axis in range(len(shape)) if axis not in left_out]
    batching = numbers.operand_batching_dims, numbers.start_indices_batching_dims
    windows = _Windows(
        operation, shape, indices, p["slice_sizes"], numbers.start_index_map, window_axes, batching,
        _is_clipped(p["mode"]),
    )  # fmt: skip
    rank = len(operation.shape)
    mesh = np.broadcast_shapes(operation.prefix(x), operation.prefix(indices))
    x = np.broadcast_to(x, (*mesh, *shape))
    result = x[(*_mesh_indices(operation, mesh, rank), *windows.positions)]
    if not windows.inside.all():
        result = np.where(windows.inside, result, _fill_value(operation))
    # Windows come last; put each of their axes where the result has it.
    batch_axes = iter(range(k, k + rank - len(window_axes)))
    offset_axes = iter(range(k + rank - len(window_axes), k + rank))
    order = [next(offset_axes if axis in numbers.offset_dims else batch_axes) for axis in range(rank)]
    return result.transpose(*range(k), *order)


def _fill_value(operation: Operation):
    """Returns what a gather has out of bounds in the mode `fill`."""
    given, dtype = operation.params.get("fill_value"), working_dtype(operation.dtype)
    if given is not None:
        return np.asarray(given).astype(dtype)
    if is_float(operation.dtype):
        return np.array(np.nan, dtype)
    if dtype == np.dtype(bool):
        return np.True_
    limits = np.iinfo(dtype)
    return np.array(limits.min if dtype.kind == "i" else limits.max, dtype)


def _scatter(combine: np.ufunc | None):
    """Returns the rule of a scatter that combines by a ufunc, or replaces."""

    def apply(operation: Operation, x, indices, updates):
        p, k = operation.params, len(operation.mesh)
        if combine is None and p["update_jaxpr"] is not None:
            raise NotImplementedError("a function of elements")
        numbers, shape = p["dimension_numbers"], operation.shape
        left_out = {*numbers.inserted_window_dims, *numbers.operand_batching_dims}
        window_axes = [axis for axis in range(len(shape)) if axis not in left_out]
        rank = len(operation.inputs[2].shape)
        batch_axes = [axis for axis in range(rank) if axis not in numbers.update_window_dims]
        updates = updates.transpose(*range(k), *(k + axis for axis in (*batch_axes, *numbers.update_window_dims)))
        sizes = [1] * len(shape)
        for axis, size in zip(window_axes, updates.shape[k + len(batch_axes) :], strict=True):
            sizes[axis] = size
        batching = numbers.operand_batching_dims, numbers.scatter_indices_batching_dims
        windows = _Windows(
            operation, shape, indices, sizes, numbers.scatter_dims_to_operand_dims, window_axes, batching,
            _is_clipped(p["mode"]),
        )  # fmt: skip
        mesh = np.broadcast_shapes(*(operation.prefix(each) for each in (x, indices, updates)))
        result = np.broadcast_to(x, (*mesh, *shape)).copy()
        own = updates.shape[k:]
        places = [*_mesh_indices(operation, mesh, rank), *windows.positions]
        flat = np.ravel_multi_index(np.broadcast_arrays(*places), result.shape) if shape else _flat_scalars(mesh, own)
        flat = np.broadcast_to(flat, (*mesh, *own))
        values, inside = np.broadcast_to(updates, flat.shape), np.broadcast_to(windows.inside, flat.shape)
        flat, values = flat[inside], values[inside]
        target = result.reshape(-1)
        if combine is np.add and result.dtype.kind == "f":
            target += np.bincount(flat, values, target.size)
        elif combine is None:
            target[flat] = values
        else:
            combine.at(target, flat, values)
        return target.reshape(result.shape)

    return apply


def _flat_scalars(mesh: tuple[int, ...], own: tuple[int, ...]) -> ndarray:
    return np.arange(int(np.prod(mesh))).reshape((*mesh, *[1] * len(own)))


rule("scatter")(_scatter(None))
rule("scatter-add")(_scatter(np.add))
rule("scatter-sub")(_scatter(np.subtract))
rule("scatter-mul")(_scatter(np.multiply))
rule("scatter-min")(_scatter(np.minimum))
rule("scatter-max")(_scatter(np.maximum))
