"""Names the mistake behind a wrong result of a shard function, from the values that each device returned.

A mistake with collectives leaves a mark in the values: without a psum the devices' results add up to the right one,
with one psum too many the result is a multiple of it. Each test below looks for one mark.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import numpy as np

from shardformer.analysis.shard_runs import subsets

RELATIVE = 1e-4  # of the largest value; float32 results of these sizes agree to 1e-6


class Case(NamedTuple):
    """One wrong output: `got` and `expected` are [*mesh, *block] of equal shapes."""

    name: str
    got: np.ndarray
    expected: np.ndarray
    sizes: Mapping[str, int]  # of the mesh's axes
    arguments: Mapping[str, np.ndarray]  # blocks of the function's arguments, [*mesh, *block]

    def sum_over(self, values: np.ndarray, axes: tuple[str, ...]) -> np.ndarray:
        """Returns, on every device, the sum of the values of the devices along the axes."""
        dimensions = tuple(list(self.sizes).index(axis) for axis in axes)
        return np.broadcast_to(values.sum(dimensions, keepdims=True), values.shape)

    def count(self, axes: tuple[str, ...]) -> int:
        return int(np.prod([self.sizes[axis] for axis in axes]))

    def is_equal_along(self, values: np.ndarray, axes: tuple[str, ...]) -> bool:
        """Returns True if the devices along the axes hold equal values."""
        return equal(self.sum_over(values, axes) / self.count(axes), values)

    @property
    def axes(self) -> list[tuple[str, ...]]:
        """The subsets of the axes that have more than one device."""
        return subsets(tuple(axis for axis, size in self.sizes.items() if size > 1))


def equal(got: np.ndarray, expected: np.ndarray) -> bool:
    """Compares within rounding; NaN equals NaN."""
    if got.shape != expected.shape:
        return False
    scale = float(np.nanmax(np.abs(np.where(np.isfinite(expected), expected, 0)), initial=0))
    return bool(np.allclose(got, expected, rtol=RELATIVE, atol=RELATIVE * scale + 1e-9, equal_nan=True))


def diagnose(
    name: str, got: np.ndarray, expected: np.ndarray, full_shape: tuple[int, ...],
    sizes: Mapping[str, int], arguments: Mapping[str, np.ndarray],
) -> str | None:  # fmt: skip
    """Returns one sentence that names the mistake in an output, or None if the output is right."""
    if got.shape != expected.shape:
        return _wrong_shape(name, got.shape[len(sizes) :], expected.shape[len(sizes) :], full_shape, sizes)
    if equal(got, expected):
        return None
    case = Case(name, got.astype(np.float64), expected.astype(np.float64), sizes, arguments)
    sentences = (sentence for test in TESTS for sentence in test(case))
    return next(sentences)


def _wrong_shape(name: str, got: tuple, block: tuple, full: tuple, sizes: Mapping[str, int]) -> str:
    sentence = f"`{name}` has shape {list(got)} on each device; expected the block {list(block)} of {list(full)}"
    if got == full:
        split = [axis for axis, size in sizes.items() if size > 1]
        how = f"with lax.psum_scatter, or a slice at axis_index of {' or '.join(split) or 'the mesh'}"
        return f"{sentence}: keep this device's own part, {how}."
    if got[1:] == block:
        return (
            f"{sentence}: there is one axis too many, of {got[0]}. lax.all_gather without tiled=True stacks the "
            "devices' blocks, and jax.vmap stacks rows: join them, add them, or take one."
        )
    return sentence + "."


def _non_finite(case: Case) -> Iterator[str]:
    wrong = ~np.isfinite(case.got) & np.isfinite(case.expected)
    if wrong.any():
        where = _list_devices(case, wrong.reshape(*case.sizes.values(), -1).any(axis=-1))
        yield f"`{case.name}` is not finite on {where}: an exponential that overflows, or a division by zero?"


def _only_parts(case: Case) -> Iterator[str]:
    for axes in case.axes:
        if equal(case.sum_over(case.got, axes), case.expected):
            over = _name(axes)
            yield (f"`{case.name}`: every device holds only its own part of a sum; the sum over {over} is right. "
                   f"A psum over {over} is missing.")  # fmt: skip


def _wrong_axis(case: Case) -> Iterator[str]:
    for used in case.axes:
        for right in case.axes:
            summed = case.sum_over(case.got, right), case.sum_over(case.expected, used)
            if not set(used) & set(right) and not case.is_equal_along(case.expected, used) and equal(*summed):
                over = f"{_name(used)}, whose devices hold other data, not over {_name(right)}"
                yield f"`{case.name}` was summed over {over}."


def _sum_too_many(case: Case) -> Iterator[str]:
    for axes in case.axes:
        if not case.is_equal_along(case.expected, axes) and equal(case.got, case.sum_over(case.expected, axes)):
            over = _name(axes)
            yield (f"`{case.name}` was summed over {over}, whose devices hold different data: each device should keep "
                   "its own result.")  # fmt: skip


def _factor(case: Case) -> Iterator[str]:
    for axes in case.axes:
        count = " * ".join(axes)
        if equal(case.got, case.expected * case.count(axes)):
            yield (f"`{case.name}` is {count} = {case.count(axes)} times too large: it is summed over {_name(axes)} "
                   "once too often (a psum is differentiated to a second psum, or it adds full values).")  # fmt: skip
        if equal(case.got * case.count(axes), case.expected):
            yield (f"`{case.name}` is {count} = {case.count(axes)} times too small: it is averaged, or divided, over "
                   f"{_name(axes)} once too often.")  # fmt: skip
    product = float((case.got * case.expected).sum())
    factor = product / max(float(np.square(case.expected).sum()), 1e-30)
    if abs(factor) < RELATIVE and not case.got.any():
        yield f"`{case.name}` is zero on every device."
    if abs(factor) > RELATIVE and equal(case.got, factor * case.expected):
        yield f"`{case.name}` is {factor:.4g} times what it should be, on every device."


def _other_block(case: Case) -> Iterator[str]:
    for dimension, (axis, size) in enumerate(case.sizes.items()):
        if size == 1 or case.is_equal_along(case.expected, (axis,)):
            continue
        first = np.broadcast_to(case.expected.take([0], dimension), case.expected.shape)
        if equal(case.got, first):
            yield (f"along {axis}, every device holds the `{case.name}` of the first one: "
                   f"its position, lax.axis_index('{axis}'), is not used.")  # fmt: skip
        for shift in range(1, size):
            if equal(case.got, np.roll(case.expected, shift, dimension)):
                yield (f"along {axis}, device i holds the `{case.name}` of device i - {shift} (in a ring of {size}): "
                       "an index, or the direction of a ppermute, is off.")  # fmt: skip
        if equal(case.got, np.flip(case.expected, dimension)):
            yield f"along {axis}, the devices hold the `{case.name}` of one another in reverse order."


def _copies_of_argument(case: Case) -> Iterator[str]:
    difference = case.got - case.expected
    for name, block in case.arguments.items():
        try:
            block = np.broadcast_to(_align(block.astype(np.float64), case), difference.shape)
        except (ValueError, TypeError):
            continue
        copies = float((difference * block).sum()) / max(float(np.square(block).sum()), 1e-30)
        if abs(copies) < RELATIVE or not equal(case.expected + copies * block, case.got):
            continue
        if copies < 0:
            yield f"`{case.name}` lacks `{name}`{'' if equal_number(copies, -1) else f' {-copies:.3g} times'}."
        for axes in case.axes:
            if equal_number(copies, case.count(axes) - 1):
                over = _name(axes)
                yield (f"`{case.name}` holds `{name}` {case.count(axes)} times: every device of {over} added it before "
                       f"the sum. Add it once, after the psum over {over}.")  # fmt: skip
        yield f"`{case.name}` holds {copies:.3g} more copies of `{name}` than it should."


def _align(block: np.ndarray, case: Case) -> np.ndarray:
    """Adds axes between the mesh's and the block's, as broadcasting aligns the last axes."""
    mesh = block.shape[: len(case.sizes)]
    missing = case.expected.ndim - block.ndim
    return block.reshape(*mesh, *[1] * missing, *block.shape[len(case.sizes) :])


def _some_devices(case: Case) -> Iterator[str]:
    difference = np.abs(case.got - case.expected).reshape(*case.sizes.values(), -1).max(axis=-1)
    scale = max(float(np.abs(case.expected).max()), 1e-30)
    wrong = difference > RELATIVE * scale
    off = float(difference.max()) / scale
    error = f"the largest error is {off:.2g} times the largest right value"
    yield f"`{case.name}` is wrong on {_list_devices(case, wrong)}; {error}."


TESTS: tuple[Callable[[Case], Iterator[str]], ...] = (
    _non_finite, _factor, _only_parts, _sum_too_many, _other_block, _copies_of_argument, _wrong_axis, _some_devices,
)  # fmt: skip


def equal_number(got: float, expected: float) -> bool:
    return abs(got - expected) < 1e-3


def _list_devices(case: Case, wrong: np.ndarray) -> str:
    """Names the devices of a mask over the mesh by one axis if an axis explains it."""
    if wrong.all():
        return "every device"
    for dimension, axis in enumerate(case.sizes):
        rest = tuple(d for d in range(wrong.ndim) if d != dimension)
        if (wrong.any(axis=rest) == wrong.all(axis=rest)).all():
            indices = ", ".join(str(i) for i in np.flatnonzero(wrong.any(axis=rest)))
            return f"the devices {axis} = {indices} (the others are right)"
    named = [" ".join(f"{axis}={i}" for axis, i in zip(case.sizes, at, strict=True)) for at in np.argwhere(wrong)]
    return f"the devices {'; '.join(named)} (the others are right)"


def _name(axes: tuple[str, ...]) -> str:
    return " and ".join(axes)
