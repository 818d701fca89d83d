"""The bias and the residual

When `down` is split by rows (lesson 2), each device's product is a part of a sum. The bias of the layer and the
residual connection are not parts: every device holds them in full. Where do you add them?
"""

from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 1, "mp": 2})
IN_SPECS = (P("dp", None), P("dp", "mp"), P("mp", None), P(None))
OUT_SPECS = {"y": P("dp", None)}


def dense(x, hidden, down, bias):
    return {"y": x + hidden @ down + bias}


# %% shard
def on_shard(x, hidden, down, bias):
    # Blocks: x [rows / dp, d], hidden [rows / dp, features / mp], down [features / mp, d], bias [d].
    # solution
    y = x + lax.psum(hidden @ down, "mp") + bias
    # hole: Compute y [rows / dp, d].
    return {"y": y}


# %% checks
def make_arguments(draw, sizes):
    shapes = (8, 6), (8, 16), (16, 6), (6,)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def both_inside(x, hidden, down, bias):
    """Every device added the bias and the residual before the sum, so both count mp times: add them after the psum."""
    return {"y": lax.psum(x + hidden @ down + bias, "mp")}


def no_psum(x, hidden, down, bias):
    """The psum over mp is missing: every device added the residual and the bias to its own part of the product."""
    return {"y": x + hidden @ down + bias}


def neither(x, hidden, down, bias):
    """`y` lacks the residual and the bias: add `x` and `bias` after the psum."""
    return {"y": lax.psum(hidden @ down, "mp")}


def averaged(x, hidden, down, bias):
    """The parts of the product were averaged over mp; they must be added (psum, not pmean)."""
    return {"y": x + lax.pmean(hidden @ down, "mp") + bias}


def sum_over_every_axis(x, hidden, down, bias):
    """The products were added over dp too, but the devices of dp hold other rows of `x`. Sum over mp only."""
    return {"y": x + lax.psum(hidden @ down, ("dp", "mp")) + bias}


MISTAKES = (sum_over_every_axis, both_inside, no_psum, neither, averaged)
