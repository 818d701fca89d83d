"""Columns, then rows

A feed-forward layer is two matrices with a nonlinear function between them: `gelu(x @ up) @ down`. Split `up` by
columns: each device computes some of the hidden features, completely. The gelu needs no other feature, so nothing is
sent. Split `down` by rows, with the same features: each device computes a part of every output. One all-reduce adds
the parts.

So a pair of matrices costs one all-reduce. This is the tensor parallelism of Megatron-LM. The rows of `x` are examples,
split over dp; no device needs those of another one. (`learn glossary` explains the words and the bytes.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 1, "mp": 4})
IN_SPECS = (P("dp", None), P(None, "mp"), P("mp", None))
OUT_SPECS = {"y": P("dp", None)}


def dense(x, up, down):
    hidden = jax.nn.gelu(x @ up)
    return {"y": hidden @ down}


# %% shard
def on_shard(x, up, down):
    # Blocks: x [rows / dp, d], up [d, features / mp], down [features / mp, d].
    # solution
    hidden = jax.nn.gelu(x @ up)
    y = lax.psum(hidden @ down, "mp")
    # hole: Compute y [rows / dp, d] with one collective.
    return {"y": y}


# %% checks
def make_arguments(draw, sizes):
    shapes = (8, 6), (6, 16), (16, 6)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def sum_before_gelu(x, up, down):
    """`y` is wrong because the hidden features were summed over mp before the gelu. The devices hold different
    features, columns of `up`: they must not be added. Sum after the product with `down`."""
    return {"y": jax.nn.gelu(lax.psum(x @ up, "mp")) @ down}


def sum_twice_around_gelu(x, up, down):
    """`y` is wrong because the hidden features were summed over mp before the gelu, and the result again. Only the
    products with `down` are parts of a sum."""
    return {"y": lax.psum(jax.nn.gelu(lax.psum(x @ up, "mp")) @ down, "mp")}


def gelu_after_sum(x, up, down):
    """The gelu belongs between the two products, on the hidden features of each device."""
    return {"y": jax.nn.gelu(lax.psum((x @ up) @ down, "mp"))}


def no_gelu(x, up, down):
    """The gelu between the two products is missing."""
    return {"y": lax.psum((x @ up) @ down, "mp")}


def sum_over_every_axis(x, up, down):
    """`y` was summed over dp too, but the devices of dp hold different rows of `x`. Sum over mp only."""
    return {"y": lax.psum(jnp.asarray(jax.nn.gelu(x @ up) @ down), ("dp", "mp"))}


MISTAKES = (sum_before_gelu, sum_twice_around_gelu, gelu_after_sum, no_gelu, sum_over_every_axis)
