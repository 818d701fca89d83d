"""ZeRO: every device keeps a part of the state

With plain data parallelism every device keeps all parameters and all of the optimizer's state, although all devices
compute the same update. ZeRO splits both over dp. A step then has three parts:

  1. gather the parameters (stage 3; stages 1 and 2 keep them in full),
  2. compute the gradient of this device's rows with respect to the full parameters,
  3. reduce-scatter: every device gets the sum over dp of its own part of the gradient, and updates that part.

An all-reduce is a reduce-scatter followed by an all-gather. So ZeRO-1 sends no more than plain data parallelism, and
ZeRO-3 half as much again.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 8}, {"dp": 2})
IN_SPECS = (P("dp"), P("dp"), P("dp", None), P("dp"))
OUT_SPECS = {"w": P("dp"), "momentum": P("dp")}
ROWS = 16  # of the full batch


def sum_of_losses(w, x, y):
    return jnp.square(x @ w - y).sum()


def update(w, momentum, gradient):
    momentum = 0.9 * momentum + gradient
    return {"w": w - 0.1 * momentum, "momentum": momentum}


def dense(w, momentum, x, y):
    return update(w, momentum, jax.grad(sum_of_losses)(w, x, y) / ROWS)


# %% shard
def on_shard(w, momentum, x, y):
    # Blocks: w and momentum [d / dp], x [ROWS / dp, d], y [ROWS / dp].
    # solution
    full = lax.all_gather(w, "dp", tiled=True)
    gradient = jax.grad(sum_of_losses)(full, x, y) / ROWS
    local_gradient = lax.psum_scatter(gradient, "dp", tiled=True)
    # hole: Gather w, differentiate, and reduce the gradient of the mean loss to this device's part [d / dp].
    # hole: With tiled=True, lax.all_gather and lax.psum_scatter keep the number of axes.
    return update(w, momentum, local_gradient)


# %% checks
def make_arguments(draw, sizes):
    shapes = (16,), (16,), (ROWS, 16), (ROWS,)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def _update(w, momentum, x, y, reduce):
    full = lax.all_gather(w, "dp", tiled=True)
    return update(w, momentum, reduce(jax.grad(sum_of_losses)(full, x, y)))


def _slice(gradient, index):
    size = gradient.size // lax.axis_size("dp")
    return lax.dynamic_slice_in_dim(gradient, size * index, size)


def local_rows_only(w, momentum, x, y):
    """Every device updated its part with the gradient of its own rows: the gradients of the other rows are missing.
    Use lax.psum_scatter, which adds over dp and keeps one part."""
    return _update(w, momentum, x, y, lambda gradient: _slice(gradient, lax.axis_index("dp")) / ROWS)


def not_divided(w, momentum, x, y):
    """The gradient is that of the sum of the losses; the loss is a mean: divide by ROWS."""
    return _update(w, momentum, x, y, lambda gradient: lax.psum_scatter(gradient, "dp", tiled=True))


def divided_by_local_rows(w, momentum, x, y):
    """The gradient was divided by the rows of this device and added over dp, so it is dp times too large: divide by
    ROWS, the rows of the full batch."""
    return _update(w, momentum, x, y, lambda gradient: lax.psum_scatter(gradient / len(y), "dp", tiled=True))


def divided_twice(w, momentum, x, y):
    """The gradient is dp times too small: it was divided by ROWS and by dp too."""
    count = lax.axis_size("dp")
    return _update(w, momentum, x, y, lambda gradient: lax.psum_scatter(gradient, "dp", tiled=True) / ROWS / count)


def first_part(w, momentum, x, y):
    """Every device updated its part with the gradient of the first part: slice at lax.axis_index("dp"), or use
    lax.psum_scatter."""
    return _update(w, momentum, x, y, lambda gradient: _slice(lax.psum(gradient, "dp"), 0) / ROWS)


def gradient_with_stale_blocks(w, momentum, x, y):
    """The gradient was computed from this device's part of w, repeated; gather the parts of all devices."""
    full = jnp.tile(w, lax.axis_size("dp"))
    gradient = jax.grad(sum_of_losses)(full, x, y) / ROWS
    return update(w, momentum, lax.psum_scatter(gradient, "dp", tiled=True))


HINTS = {
    "contracting dimensions": " Pass tiled=True to lax.all_gather, which then joins the parts.",
    "must be divisible by shard_count": " This is already a part: the gradient of lax.all_gather is a reduce-scatter. "
    "Differentiate with respect to the full w.",
    "incompatible shapes": " local_gradient must be this device's part [d / dp]: lax.psum keeps the full sum, "
    "lax.psum_scatter(..., tiled=True) one part.",
}
MISTAKES = (local_rows_only, divided_by_local_rows, not_divided, divided_twice, first_part, gradient_with_stale_blocks)
