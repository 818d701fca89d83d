"""Operations along axes: sums and extremes, running sums, and sorting."""

import functools

import numpy as np
import scipy.special
from numpy import ndarray

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
    rising = np.argsort(np.flip(_sortable(x), axis), axis, kind="stable")
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


@rule("logsumexp")
def logsumexp(operation: Operation, x):
    return scipy.special.logsumexp(x, own_axes(len(operation.inputs[0].shape), operation.params["axes"]))
