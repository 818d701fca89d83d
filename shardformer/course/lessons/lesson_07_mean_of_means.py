"""Data parallel, and the mean of means

With data parallelism every device holds the full model and a part of the batch. The loss is the mean over the rows with
weight 1 (in a language model: the tokens that count). The devices have different numbers of them, because some rows
are masked. So the mean of the devices' means is not the mean: a device with few rows would count as much as one with
many.

Differentiate the sum of this device's rows, and then add the gradients with a psum. Do not differentiate a function
that holds a psum: its gradient would be added once more (lesson 1).
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 8}, {"dp": 2})
IN_SPECS = (P(), P("dp", None), P("dp"), P("dp"))
OUT_SPECS = {"loss": P(), "gradient": P()}


def sum_of_losses(w, x, y, weights):
    return (weights * jnp.square(x @ w - y)).sum()


def dense(w, x, y, weights):
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return {"loss": total / weights.sum(), "gradient": gradient / weights.sum()}


# %% shard
def on_shard(w, x, y, weights):
    # Blocks: w [d] in full, x [rows / dp, d], y and weights [rows / dp].
    # solution
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    total, gradient, count = lax.psum((total, gradient, weights.sum()), "dp")
    loss, gradient = total / count, gradient / count
    # hole: Compute the loss and its gradient over all rows, the same on every device.
    return {"loss": loss, "gradient": gradient}


# %% checks
def make_arguments(draw, sizes):
    weights = (draw.random(16) < draw.random(16)).astype("float32")
    weights[::2] = 1
    shapes = (4,), (16, 4), (16,)
    return (*(draw.normal(size=shape).astype("float32") for shape in shapes), weights)


def mean_of_means(w, x, y, weights):
    """This is a mean of means: every device divided by its own number of rows. Add the sums and the numbers of
    rows over dp first, then divide."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return lax.pmean({"loss": total / weights.sum(), "gradient": gradient / weights.sum()}, "dp")


def sum_of_means(w, x, y, weights):
    """Every device divided by its own number of rows, and the means were added. Add the sums and the numbers of
    rows over dp first, then divide."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return lax.psum({"loss": total / weights.sum(), "gradient": gradient / weights.sum()}, "dp")


def local_means(w, x, y, weights):
    """Nothing was added over dp: every device has the mean of its own rows."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return {"loss": total / weights.sum(), "gradient": gradient / weights.sum()}


def local_gradient(w, x, y, weights):
    """The loss is right, but the gradient is that of this device's rows only: a psum over dp is missing."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    count = lax.psum(weights.sum(), "dp")
    return {"loss": lax.psum(total, "dp") / count, "gradient": gradient / count}


def local_count(w, x, y, weights):
    """The sums are added over dp, but divided by the number of rows of this device only: add the numbers too."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    total, gradient = lax.psum((total, gradient), "dp")
    return {"loss": total / weights.sum(), "gradient": gradient / weights.sum()}


def count_of_rows(w, x, y, weights):
    """The sums are divided by the number of all rows; divide by the sum of the weights, without masked rows."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    rows = lax.psum(weights.size, "dp")
    return {"loss": lax.psum(total, "dp") / rows, "gradient": lax.psum(gradient, "dp") / rows}


def undivided(w, x, y, weights):
    """The sums over dp are right, but not divided by the number of rows."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return lax.psum({"loss": total, "gradient": gradient}, "dp")


def loss_as_mean_of_means(w, x, y, weights):
    """The gradient is right, but the loss is a mean of means: add the sums and the numbers of rows over dp first."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    count = lax.psum(weights.sum(), "dp")
    return {"loss": lax.pmean(total / weights.sum(), "dp"), "gradient": lax.psum(gradient, "dp") / count}


def gradient_as_mean_of_means(w, x, y, weights):
    """The loss is right, but its gradient is a mean of means: divide the sum of the gradients by the sum of the
    numbers of rows."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    count = lax.psum(weights.sum(), "dp")
    return {"loss": lax.psum(total, "dp") / count, "gradient": lax.pmean(gradient / weights.sum(), "dp")}


def divided_twice(w, x, y, weights):
    """The sums were divided by the number of rows and averaged over dp as well: use psum, not pmean, for the sums."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    count = lax.psum(weights.sum(), "dp")
    return lax.pmean({"loss": total / count, "gradient": gradient / count}, "dp")


def psum_in_the_loss(w, x, y, weights):
    """The loss is right, but its gradient went through a psum, which is differentiated to a second psum. Differentiate
    the sum of this device's rows, then add the gradients."""

    def compute_loss(w):
        return lax.psum(sum_of_losses(w, x, y, weights), "dp") / lax.psum(weights.sum(), "dp")

    loss, gradient = jax.value_and_grad(compute_loss)(w)
    return {"loss": loss, "gradient": gradient}


def psum_in_the_loss_and_behind_it(w, x, y, weights):
    """The gradient is dp times too large: the loss holds a psum, which is differentiated to a psum, and the gradients
    were added again. Differentiate the sum of this device's rows, then add the gradients once."""
    parts = psum_in_the_loss(w, x, y, weights)
    return parts | {"gradient": lax.psum(parts["gradient"], "dp")}


def averaged_and_local_count(w, x, y, weights):
    """The sums were averaged over dp and divided by this device's own number of rows: add the sums and the numbers
    over dp, then divide."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    total, gradient = lax.pmean((total, gradient), "dp")
    return {"loss": total / weights.sum(), "gradient": gradient / weights.sum()}


def local_sums(w, x, y, weights):
    """These are the sums of this device's rows: add them and the numbers of rows over dp, then divide."""
    total, gradient = jax.value_and_grad(sum_of_losses)(w, x, y, weights)
    return {"loss": total, "gradient": gradient}


MISTAKES = (
    mean_of_means, sum_of_means, local_means, local_gradient, local_count, count_of_rows, undivided,
    loss_as_mean_of_means, gradient_as_mean_of_means, divided_twice,
    psum_in_the_loss, psum_in_the_loss_and_behind_it, averaged_and_local_count, local_sums,
)  # fmt: skip
