"""The all-reduce and its gradient

A function of one shard sees only the block of its device. `lax.psum(part, "mp")` adds the parts of all devices along
the mesh axis `mp` and gives every device the sum: an all-reduce.

Here each device holds a part of the vector `w`, and the loss is a sum over all of `w`. Every device computes the whole
loss, so every device differentiates the whole loss. What must flow back through the sum? The loss grows by 1 when this
device's part grows by 1. So the gradient passes through unchanged.

JAX does not know that. In a shard function without types (`check_vma=False`), it assumes that each device has another
loss, and adds the gradients of all of them: it differentiates a psum to a psum. Here the losses are copies of one, so
the gradient would be mp times too large. Megatron-LM therefore writes this sum with its own gradient, and so do you.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"mp": 2})
IN_SPECS = (P("mp"), P("mp"))
OUT_SPECS = {"loss": P(), "gradient": P("mp")}


def dense(w, x):
    def compute_loss(w):
        return jnp.tanh(w * x).sum()

    loss, gradient = jax.value_and_grad(compute_loss)(w)
    return {"loss": loss, "gradient": gradient}


# %% shard
@jax.custom_vjp
def sum_over_mp(part):
    # solution
    return lax.psum(part, "mp")
    # hole: Return the sum of the parts over mp.


def forward(part):
    return sum_over_mp(part), None


def backward(_, gradient_of_sum):
    # solution
    return (gradient_of_sum,)
    # hole: Return a tuple with one entry, (...,): the gradient of `part`.


sum_over_mp.defvjp(forward, backward)


def on_shard(w, x):
    def compute_loss(w):
        return sum_over_mp(jnp.tanh(w * x).sum())

    loss, gradient = jax.value_and_grad(compute_loss)(w)
    return {"loss": loss, "gradient": gradient}


# %% checks
def make_arguments(draw, sizes):
    return draw.normal(size=16).astype("float32"), draw.normal(size=16).astype("float32")


def summed_gradient(w, x):
    """The gradients of `w` are mp times too large: the psum is differentiated to a second psum. Each device already
    has the gradient of the whole loss, so `backward` must return it unchanged."""

    def compute_loss(w):
        return lax.psum(jnp.tanh(w * x).sum(), "mp")

    loss, gradient = jax.value_and_grad(compute_loss)(w)
    return {"loss": loss, "gradient": gradient}


def divided_gradient(w, x):
    """The gradients of `w` are mp times too small: each device already has the gradient of the whole loss, so
    `backward` must return it unchanged."""
    parts = summed_gradient(w, x)
    return parts | {"gradient": parts["gradient"] / lax.axis_size("mp") ** 2}


def parts_added_over_dp(w, x):
    """The parts were added over dp, whose devices hold equal parts. `w` is split over mp: sum over mp."""
    return summed_gradient(w, x) | {"loss": lax.psum(jnp.tanh(w * x).sum(), "dp"), "gradient": dense(w, x)["gradient"]}


MISTAKES = (summed_gradient, divided_gradient, parts_added_over_dp)
HINTS = {"bwd rule must produce": " Return a tuple with one entry: (gradient_of_part,)."}
