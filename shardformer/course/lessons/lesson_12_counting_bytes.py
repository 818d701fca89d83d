"""Reading the program: what does a collective cost?

XLA compiles a shard function to a program in HLO. Its collectives are lines such as

  %x = f32[64,16] all-gather(f32[16,16] %w), replica_groups={{0,1,2,3}}, dimensions={0}

which says: 4 devices exchange; each gives 16 x 16 numbers and has 64 x 16 afterwards. In a ring of n devices, each
device sends, for a result of b bytes,

  all-reduce      2 * (n - 1) / n * b
  all-gather          (n - 1) / n * b    (b: of the gathered array)
  reduce-scatter      (n - 1)     * b    (b: of the part that is kept)

`on_shard` below computes two numbers: the norm of the full matrix `w`, and the mean of the products `x @ w`. It is
right but wasteful: it gathers the matrix. Rewrite it so that it all-reduces only two numbers (b = 8 bytes together),
and return from `predict_bytes` what each device then sends. The checker counts the bytes of the compiled program.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"mp": 8}, {"mp": 2})
IN_SPECS = (P(), P(None, "mp"))
OUT_SPECS = {"norm": P(), "mean": P()}


def dense(x, w):
    return {"norm": jnp.sqrt(jnp.square(w).sum()), "mean": (x @ w).mean()}


# %% shard
def on_shard(x, w):
    # Blocks: x [rows, d] in full, w [d, columns / mp].
    # Wasteful: full = lax.all_gather(w, "mp", axis=1, tiled=True), and then as in `dense`.
    # solution
    squares, mean = lax.psum(jnp.square(w).sum(), "mp"), lax.pmean((x @ w).mean(), "mp")
    return {"norm": jnp.sqrt(squares), "mean": mean}
    # hole: Return {"norm": ..., "mean": ...} without gathering w.


def predict_bytes(n):
    """Returns the bytes that each of n devices sends in `on_shard`."""
    # solution
    return 2 * (2 * (n - 1) / n * 4)
    # hole: Return a number, by the formulas above.


# %% checks
def make_arguments(draw, sizes):
    return draw.normal(size=(4, 16)).astype("float32"), draw.normal(size=(16, 64)).astype("float32")


def check_more(answer, sizes):
    """Compares the predicted bytes with those of two all-reduced numbers."""
    n = sizes["mp"]
    sent = 2 * (2 * (n - 1) / n * 4)
    try:
        got = float(answer.predict_bytes(n))
    except NotImplementedError:
        return ["the second hole is open: predict_bytes(n) returns the bytes that each of n devices sends."]
    except (TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
        return [f"predict_bytes({n}) fails: {error}; expected a number."]
    if abs(got - sent) < 0.5:
        return []
    return [f"predict_bytes({n}) returns {got:g}, and the program sends {sent:g}: {_explain(got, n)}"]


def _explain(got, n):
    """Returns the likely mistake behind a wrong number of bytes."""
    typical = {
        2 * (n - 1) / n * 4: "that is half: either one of the two numbers is missing, or the all-reduce is counted as "
        "one of its halves; it sends 2 * (n - 1) / n.",
        2 * (2 * (n - 1) / n): "a float32 number has 4 bytes.",
        2 * 4: "the formula of an all-reduce is 2 * (n - 1) / n * b.",
        2 * 2 * (n - 1) * 4: "divide by n: in a ring each device sends parts of 1 / n.",
        2 * 2 * 4: "a device does not send all of the array: 2 * (n - 1) / n of it.",
        2 * (2 * (n - 1) / n * 8): "a float32 number has 4 bytes, not 8.",
        n * 2 * (2 * (n - 1) / n * 4): "that is the sum of all devices; state what one device sends.",
    }
    return next(
        (sentence for value, sentence in typical.items() if abs(got - value) < 1e-3), "two all-reduces of 4 bytes."
    )


def local_columns(x, w):
    """Both numbers are those of this device's columns only: a psum of the squares and a pmean of the mean are
    missing."""
    return {"norm": jnp.sqrt(jnp.square(w).sum()), "mean": (x @ w).mean()}


def sum_of_norms(x, w):
    """The norms of the devices' columns were added: add the squares first, then take the root."""
    return {"norm": lax.psum(jnp.sqrt(jnp.square(w).sum()), "mp"), "mean": lax.pmean((x @ w).mean(), "mp")}


def mean_of_norms(x, w):
    """The norms of the devices' columns were averaged: add the squares first, then take the root."""
    return {"norm": lax.pmean(jnp.sqrt(jnp.square(w).sum()), "mp"), "mean": lax.pmean((x @ w).mean(), "mp")}


def mean_of_squares(x, w):
    """The squares were averaged over mp; they must be added (psum)."""
    return {"norm": jnp.sqrt(lax.pmean(jnp.square(w).sum(), "mp")), "mean": lax.pmean((x @ w).mean(), "mp")}


def sum_of_means(x, w):
    """The means of the devices' columns were added: average them (pmean)."""
    squares = lax.psum(jnp.square(w).sum(), "mp")
    return {"norm": jnp.sqrt(squares), "mean": lax.psum((x @ w).mean(), "mp")}


MISTAKES = (local_columns, sum_of_means, sum_of_norms, mean_of_norms, mean_of_squares)
