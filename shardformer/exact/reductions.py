"""Operations along axes: sums and extremes, of windows too, running sums, and sorting."""

import functools

import numpy as np
from numpy import ndarray

from shardformer.exact.elementwise import order_totally
from shardformer.exact.movement import list_windows, pad_windows
from shardformer.exact.operations import Operation, own_axes, rule, share_prefix


@rule("sort")
def sort(operation: Operation, *arrays):
    rank, count = len(operation.shape), operation.params["num_keys"]
    axis = operation.params["dimension"] - rank
    arrays = tuple(share_prefix(operation, arrays))
    keys = [_sortable(x) for x in arrays[:count]]
    if len(arrays) == 1:
        return np.take_along_axis(arrays[0], np.argsort(keys[0], axis, kind="stable"), axis)
    order = np.argsort(keys[0], axis, kind="stable") if count == 1 else np.lexsort(keys[::-1], axis)
    return tuple(np.take_along_axis(x, order, axis) for x in arrays)


def _sortable(x: ndarray) -> ndarray:
    return x.astype(np.int32) if x.dtype.kind not in "biufc" else x  # int4


@rule("top_k")
def top_k(operation: Operation, x):
    axis = operation.params.get("axis", len(operation.shape) - 1) - len(operation.shape)
    count = x.shape[axis]
    # A stable sort of the reversed array has equal values by falling position, so that its end has the lowest first.
    rising = np.argsort(np.flip(order_totally(_sortable(x)), axis), axis, kind="stable")
    best = count - 1 - np.flip(rising, axis)
    best = np.take(best, np.arange(operation.params["k"]), axis)
    return np.take_along_axis(x, best, axis), best.astype(operation.outputs[1].dtype)


# Reductions along own axes


def _reduce(function):
    def apply(operation: Operation, x):
        axes = own_axes(len(operation.inputs[0].shape), operation.params["axes"])
        return function(x, axis=axes)

    return apply


def _keep_dtype(ufunc: np.ufunc):
    return lambda x, axis: ufunc.reduce(x, axis=axis, dtype=x.dtype)


def _bitwise(ufunc: np.ufunc):
    """Reduces integers bit by bit, one axis after the other."""
    return lambda x, axis: functools.reduce(lambda y, a: ufunc.reduce(y, axis=a), sorted(axis), x)


rule("reduce_sum")(_reduce(_keep_dtype(np.add)))
rule("reduce_prod")(_reduce(_keep_dtype(np.multiply)))
rule("reduce_max")(_reduce(_keep_dtype(np.maximum)))
rule("reduce_min")(_reduce(_keep_dtype(np.minimum)))
rule("reduce_and")(_reduce(_bitwise(np.bitwise_and)))
rule("reduce_or")(_reduce(_bitwise(np.bitwise_or)))
rule("reduce_xor")(_reduce(_bitwise(np.bitwise_xor)))


@rule("argmax", "argmin")
def find_extreme(operation: Operation, x):
    (axis,) = own_axes(len(operation.inputs[0].shape), operation.params["axes"])
    function = np.argmax if operation.name == "argmax" else np.argmin
    return function(_sortable(x), axis).astype(operation.dtype)


def _accumulate(function):
    def apply(operation: Operation, x):
        axis = operation.params["axis"] - len(operation.shape)
        if not operation.params["reverse"]:
            return function(x, axis)
        return np.flip(function(np.flip(x, axis), axis), axis)

    return apply


rule("cumsum")(_accumulate(lambda x, axis: np.add.accumulate(x, axis, dtype=x.dtype)))
rule("cumprod")(_accumulate(lambda x, axis: np.multiply.accumulate(x, axis, dtype=x.dtype)))
rule("cummax")(_accumulate(np.maximum.accumulate))
rule("cummin")(_accumulate(np.minimum.accumulate))
rule("cumlogsumexp")(_accumulate(np.logaddexp.accumulate))


# Windows


def _reduce_windows(ufunc: np.ufunc):
    def apply(operation: Operation, x):
        p = operation.params
        padded = pad_windows(x, p["padding"], p["base_dilation"], _identity(ufunc, x.dtype))
        shape = p["window_dimensions"], p["window_strides"], p["window_dilation"]
        return functools.reduce(ufunc, (part for _, part in list_windows(padded, *shape, operation.shape)))

    return apply


def _identity(ufunc: np.ufunc, dtype):
    """Returns the number that changes no sum, or no extreme."""
    if ufunc is np.add:
        return 0
    if dtype.kind == "f":
        return -np.inf if ufunc is np.maximum else np.inf
    limits = np.iinfo(dtype)
    return limits.min if ufunc is np.maximum else limits.max


rule("reduce_window_sum")(_reduce_windows(np.add))
rule("reduce_window_max")(_reduce_windows(np.maximum))
rule("reduce_window_min")(_reduce_windows(np.minimum))


@rule("select_and_scatter_add")
def select_and_scatter_add(operation: Operation, source, x):
    """Adds each element of the source to the first extreme of its window: the gradient of pooling by max or min."""
    p, k = operation.params, len(operation.mesh)
    is_better = np.greater if p["select_prim"].name == "ge" else np.less
    source, x = share_prefix(operation, (source, x))
    flat = np.arange(x.size).reshape(x.shape)
    plain = (1,) * len(operation.shape)
    shape = p["window_dimensions"], p["window_strides"], plain, source.shape[k:]
    padded = pad_windows(x, p["padding"], plain, 0), pad_windows(flat, p["padding"], plain, -1)  # -1: padding
    best, place = np.zeros((), x.dtype), np.full(source.shape, -1)
    for (_, value), (_, candidate) in zip(*(list_windows(each, *shape) for each in padded), strict=True):
        better = (candidate >= 0) & ((place < 0) | is_better(value, best))
        best, place = np.where(better, value, best), np.where(better, candidate, place)
    result = np.zeros(x.size, x.dtype)
    np.add.at(result, place[place >= 0], source[place >= 0])
    return result.reshape(x.shape)
