"""Sequence parallel: the all-reduce in two halves

Tensor parallelism repeats the norms and the residual stream on every device of mp. Sequence parallelism splits them
over the tokens instead. Before the first product the tokens are gathered; after the second one the parts are added and
each device keeps its own tokens: a reduce-scatter. An all-gather and a reduce-scatter send as many bytes together as
the all-reduce that they replace. Outside of this pair, in the norms and the residual stream, the activations take
1 / mp of the memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"mp": 8}, {"mp": 2})
IN_SPECS = (P("mp", None), P(None, "mp"), P("mp", None))
OUT_SPECS = {"y": P("mp", None)}


def norm(x):
    return x * lax.rsqrt(jnp.square(x).mean(axis=-1, keepdims=True) + 1e-6)


def dense(x, up, down):
    return {"y": x + jax.nn.relu(norm(x) @ up) @ down}


# %% shard
def on_shard(x, up, down):
    # Blocks: x [tokens / mp, d], up [d, features / mp], down [features / mp, d].
    # solution
    tokens = lax.all_gather(norm(x), "mp", tiled=True)
    parts = jax.nn.relu(tokens @ up) @ down
    y = x + lax.psum_scatter(parts, "mp", tiled=True)
    # hole: Compute y [tokens / mp, d] with one lax.all_gather and one lax.psum_scatter.
    # hole: With tiled=True the blocks are joined along the first axis; without it there is a new axis.
    return {"y": y}


# %% checks
def make_arguments(draw, sizes):
    shapes = (16, 6), (6, 16), (16, 6)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def _parts(x, up, down):
    return jax.nn.relu(lax.all_gather(norm(x), "mp", tiled=True) @ up) @ down


def _own(full):
    rows = full.shape[0] // lax.axis_size("mp")
    return lax.dynamic_slice_in_dim(full, rows * lax.axis_index("mp"), rows)


def slice_without_sum(x, up, down):
    """Every device kept its own tokens of its own parts: the parts of the other devices are missing. lax.psum_scatter
    adds and keeps in one operation."""
    return {"y": x + _own(_parts(x, up, down))}


def no_gather(x, up, down):
    """The tokens were not gathered: the psum then adds products of different tokens."""
    return {"y": x + lax.psum(jax.nn.relu(norm(x) @ up) @ down, "mp")}


def neither_collective(x, up, down):
    """Nothing was gathered or added: every device used its own tokens and its own features only."""
    return {"y": x + jax.nn.relu(norm(x) @ up) @ down}


def no_residual(x, up, down):
    """The residual is missing: add `x`, this device's own tokens, after the reduce-scatter."""
    return {"y": lax.psum_scatter(_parts(x, up, down), "mp", tiled=True)}


def residual_inside(x, up, down):
    """The residual was added before the reduce-scatter, on every device: it counts mp times. Add this device's own
    tokens after it."""
    parts = lax.all_gather(x, "mp", tiled=True) + _parts(x, up, down)
    return {"y": lax.psum_scatter(parts, "mp", tiled=True)}


def first_tokens(x, up, down):
    """Every device kept the first tokens of the sum: keep this device's, with lax.psum_scatter."""
    return {"y": x + lax.psum(_parts(x, up, down), "mp")[: x.shape[0]]}


def no_norm(x, up, down):
    """The norm is missing before the first product."""
    parts = jax.nn.relu(lax.all_gather(x, "mp", tiled=True) @ up) @ down
    return {"y": x + lax.psum_scatter(parts, "mp", tiled=True)}


MISTAKES = (
    slice_without_sum, no_gather, neither_collective, no_residual, residual_inside, first_tokens, no_norm,
)  # fmt: skip
