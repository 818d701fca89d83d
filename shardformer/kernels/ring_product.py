"""A product with a gathered matrix, whose gradient is summed over rings while it is computed. Shard view.

A ring that starts from the full gradient reads and writes a slice with each send. Here each slice is a product of its
own, and the sum that was received is added before the product is written. So the full gradient is never in memory, and
the first send waits only for the first slice.
"""

import dataclasses
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.kernels import ring_scatter, staged_scatter

TILE = 128  # the side of a TPU's matrix unit: narrower slices would leave a part of it unused
FULL = 0.98  # of the tiles of a slice, at least


class Ring(NamedTuple):
    """The split of a matrix over mesh axes, constant in a trace."""

    dimension: int
    stages: tuple[int, ...]  # factors of the number of devices, the slowest first
    axes: tuple[str, ...]
    dtype: str  # of the partial sums that are sent

    @property
    def order(self) -> list[int]:
        """The stages in the order of their exchanges, as in `scatter_sum`."""
        return staged_scatter.order_stages(self.stages) if self.dimension == 0 else list(range(len(self.stages)))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class GatheredMatrix:
    """A full matrix and this device's part of it. It stands for a parameter, and its part takes the gradient."""

    full_IO: Array
    part: Array
    ring: Ring = dataclasses.field(metadata={"static": True})

    @property
    def shape(self) -> tuple[int, ...]:
        return self.full_IO.shape

    def as_array(self) -> Array:
        """Returns the full matrix as an array, whose full gradient is scattered."""
        return _join(lax.stop_gradient(self.full_IO), self.part, self.ring)


def fits(shape: tuple[int, ...], ring: Ring) -> bool:
    """Returns whether rings can sum a matrix of this shape in slices that fill a TPU's tiles."""
    if not ring.dtype or len(shape) != 2 or max(ring.stages) > ring_scatter.MOST:
        return False
    slices = [size // (ring.stages[ring.order[0]] if i == ring.dimension else 2) for i, size in enumerate(shape)]
    return all(size >= FULL * TILE * -(-size // TILE) for size in slices)


def multiply(x_BTI: Array, matrix: GatheredMatrix, dtype) -> Array:
    """Returns x @ matrix in `dtype`."""
    return _multiply(x_BTI, lax.stop_gradient(matrix.full_IO), matrix.part, matrix.ring, str(jnp.dtype(dtype)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _multiply(x_BTI, w_IO, part, ring, dtype):
    return jnp.matmul(x_BTI, w_IO.astype(x_BTI.dtype), preferred_element_type=dtype)


def _forward(x_BTI, w_IO, part, ring, dtype):
    return _multiply(x_BTI, w_IO, part, ring, dtype), (x_BTI, w_IO)


def _backward(ring, dtype, saved, dy_BTO):
    x_BTI, w_IO = saved
    x_NI, dy_NO = (a.reshape(-1, a.shape[-1]).astype(x_BTI.dtype) for a in (x_BTI, dy_BTO))
    dx_NI = dy_NO @ w_IO.astype(x_BTI.dtype).T
    return dx_NI.reshape(x_BTI.shape), None, scatter_product(x_NI, dy_NO, ring)


_multiply.defvjp(_forward, _backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def _join(full_IO, part, ring):
    return full_IO


def _scatter(ring, _, gradient):
    full = gradient.astype(jnp.float32)
    return None, staged_scatter.scatter_sum(full, ring.dimension, ring.stages, ring.axes, ring.dtype)


_join.defvjp(lambda full_IO, part, ring: (full_IO, None), _scatter)


def scatter_product(x_NI: Array, dy_NO: Array, ring: Ring) -> Array:
    """Returns this device's float32 slice of the sum of x^T @ dy over the mesh axes.

    The two halves of the other dimension go around in opposite directions.
    """
    groups, first = staged_scatter.groups_of_stages(ring.stages), ring.order[0]
    scattered, halved = (x_NI, dy_NO) if ring.dimension == 0 else (dy_NO, x_NI)
    halves = []
    for half, step in zip(jnp.split(halved, 2, axis=1), (1, -1), strict=True):

        def add_product(place: Array, received: Array | None, half=half) -> Array:
            own = _take_columns(scattered, place, ring.stages, first)
            if received is not None:  # else the compiler runs all products early, and their sums apart from them
                own, received = lax.optimization_barrier((own, received))
            left, right = (own, half) if ring.dimension == 0 else (half, own)
            product = lax.dot_general(left, right, (((0,), (0,)), ((), ())), preferred_element_type=jnp.float32)
            return product if received is None else received.astype(jnp.float32) + product

        total = ring_scatter.pass_around(add_product, ring.axes, groups[first], ring.dtype, step)
        halves.append(_scatter_rest(total, ring, groups, step))
    return lax.concatenate(halves, 1 - ring.dimension)


def _take_columns(x_NC: Array, place: Array, stages: tuple[int, ...], stage: int) -> Array:
    """Returns the columns of a member of one stage: one block for each combination of the stages before it."""
    blocks, count = math.prod(stages[:stage]), stages[stage]
    width = x_NC.shape[1] // (blocks * count)
    taken = [lax.dynamic_slice_in_dim(x_NC, (i * count + place) * width, width, 1) for i in range(blocks)]
    return lax.concatenate(taken, 1) if blocks > 1 else taken[0]


def _scatter_rest(total: Array, ring: Ring, groups: list, step: int) -> Array:
    """Scatters a sum over the stages that follow the first, in one direction."""
    first, *others = ring.order
    stages = [1 if i == first else size for i, size in enumerate(ring.stages)]
    before, after = total.shape[: ring.dimension], total.shape[ring.dimension + 1 :]
    total = total.reshape(*before, *stages, -1, *after)
    for stage in others:
        axis = ring.dimension + stage

        def add_slice(place: Array, received: Array | None, axis=axis, total=total) -> Array:
            slice_ = lax.dynamic_slice_in_dim(total, place, 1, axis)
            return slice_ if received is None else received.astype(jnp.float32) + slice_

        total = ring_scatter.pass_around(add_slice, ring.axes, groups[stage], ring.dtype, step)
    return total.reshape(*before, -1, *after)
