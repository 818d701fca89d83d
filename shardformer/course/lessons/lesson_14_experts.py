"""Experts, and a balance loss of the global batch

A mixture of experts has many feed-forwards instead of one. A router scores them for each token, and the token uses the
CHOICES experts with the largest scores: their results are added up with gates, which are the chosen scores divided by
their sum. So a model has more parameters without more work for a token.

Split the experts over mp. The tokens are split over dp only: every device of mp has the same tokens, and computes the
same scores. Choose among all experts first. Then a device computes only its own experts, with their columns of the
gates, and a psum adds up the results of all experts. It is the all-reduce that a dense layer needs too.

Routers tend to prefer a few experts. The balance loss works against it:

  balance = E * sum over the experts of f * P

f is an expert's share of the choices, P its mean score, both over the tokens of the global batch. A mean of products is
not the product of the means: average f and P over dp first, else the loss depends on the mesh.

(Here each device multiplies all tokens by each of its experts, and the gates of the others are zero. `experts=8` sorts
the tokens by expert instead, so that only chosen pairs are computed.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 4, "mp": 2})
IN_SPECS = (P("dp", None), P(), P("mp", None, None), P("mp", None, None))
OUT_SPECS = {"y": P("dp", None), "balance": P()}
CHOICES = 2  # experts of each token


def choose(scores):
    """Returns the gates [tokens, E]: the chosen scores divided by their sum, zero for the other experts."""
    least = jnp.sort(scores, axis=1)[:, -CHOICES, None]
    chosen = jnp.where(scores >= least, scores, 0)
    return chosen / chosen.sum(axis=1, keepdims=True)


def mix(x, gates, up, down):
    """Returns the sum of some experts, times their gates [tokens, experts]."""
    hidden = jax.nn.gelu(jnp.einsum("td,edf->etf", x, up))
    return jnp.einsum("te,etf,efd->td", gates, hidden, down)


def dense(x, router, up, down):
    scores = jax.nn.softmax(x @ router)
    gates = choose(scores)
    share, mean_score = (gates > 0).mean(axis=0) / CHOICES, scores.mean(axis=0)
    return {"y": mix(x, gates, up, down), "balance": len(up) * (share * mean_score).sum()}


# %% shard
def on_shard(x, router, up, down):
    # Blocks: x [tokens / dp, d], router [d, E] in full, up [E / mp, d, f], down [E / mp, f, d].
    scores = jax.nn.softmax(x @ router)
    gates = choose(scores)
    share, mean_score = (gates > 0).mean(axis=0) / CHOICES, scores.mean(axis=0)
    # solution
    experts = len(up)
    local_gates = lax.dynamic_slice_in_dim(gates, experts * lax.axis_index("mp"), experts, axis=1)
    y = lax.psum(mix(x, local_gates, up, down), "mp")
    share, mean_score = lax.pmean((share, mean_score), "dp")
    balance = gates.shape[1] * (share * mean_score).sum()
    # hole: Compute y with this device's experts, and the balance loss of the global batch.
    # hole: lax.dynamic_slice_in_dim(array, start, size, axis) takes a part of an array.
    return {"y": y, "balance": balance}


# %% checks
def make_arguments(draw, sizes):
    shapes = (16, 6), (6, 8), (8, 6, 4), (8, 4, 6)
    return tuple(draw.normal(size=shape).astype("float32") for shape in shapes)


def _route(x, router):
    scores = jax.nn.softmax(x @ router)
    return scores, choose(scores)


def _slice(array, count, first=None):
    first = count * lax.axis_index("mp") if first is None else first
    return lax.dynamic_slice_in_dim(array, first, count, axis=1)


def _balance(scores, gates):
    share, mean_score = lax.pmean(((gates > 0).mean(0) / CHOICES, scores.mean(0)), "dp")
    return gates.shape[1] * (share * mean_score).sum()


def _with(x, router, up, down, gates=None, y=None, balance=None):
    """Returns the right results with one of them replaced."""
    scores, routed = _route(x, router)
    gates = _slice(routed, len(up)) if gates is None else gates
    y = lax.psum(mix(x, gates, up, down), "mp") if y is None else y
    return {"y": y, "balance": _balance(scores, routed) if balance is None else balance}


def not_summed(x, router, up, down):
    """`y` has only the experts of this device: a psum over mp is missing."""
    _, gates = _route(x, router)
    return _with(x, router, up, down, y=mix(x, _slice(gates, len(up)), up, down))


def averaged(x, router, up, down):
    """`y` is the mean over mp of the devices' results; each is a part of a sum: use psum, not pmean."""
    _, gates = _route(x, router)
    return _with(x, router, up, down, y=lax.pmean(mix(x, _slice(gates, len(up)), up, down), "mp"))


def first_gates(x, router, up, down):
    """Every device used the gates of the first experts. Its own experts start at len(up) * lax.axis_index("mp")."""
    return _with(x, router, up, down, gates=_slice(_route(x, router)[1], len(up), 0))


def chosen_on_the_device(x, router, up, down):
    """Each device chose among its own experts, so that a token uses CHOICES experts of every device. Choose among all
    experts first, then take the columns of this device."""
    return _with(x, router, up, down, gates=choose(_slice(_route(x, router)[0], len(up))))


def divided_on_the_device(x, router, up, down):
    """The gates were divided by their sum over this device's experts: take the columns of the gates unchanged."""
    gates = _slice(_route(x, router)[1], len(up))
    total = gates.sum(1, keepdims=True)
    return _with(x, router, up, down, gates=gates / jnp.where(total > 0, total, 1))


def scores_as_gates(x, router, up, down):
    """The scores of all experts were used as gates: only the chosen experts count."""
    return _with(x, router, up, down, gates=_slice(_route(x, router)[0], len(up)))


def summed_over_dp(x, router, up, down):
    """`y` was summed over dp too, where the devices have different tokens: sum over mp only."""
    gates = _slice(_route(x, router)[1], len(up))
    return _with(x, router, up, down, y=lax.psum(mix(x, gates, up, down), ("dp", "mp")))


def balance_of_each_device(x, router, up, down):
    """The balance loss is the mean of those of the devices. It has a product: average the shares and the scores over
    dp first, then multiply."""
    scores, gates = _route(x, router)
    local = gates.shape[1] * ((gates > 0).mean(0) / CHOICES * scores.mean(0)).sum()
    return _with(x, router, up, down, balance=lax.pmean(local, "dp"))


def balance_of_local_tokens(x, router, up, down):
    """The balance loss is that of this device's tokens: average the shares and the scores over dp first."""
    scores, gates = _route(x, router)
    return _with(x, router, up, down, balance=gates.shape[1] * ((gates > 0).mean(0) / CHOICES * scores.mean(0)).sum())


def balance_with_local_scores(x, router, up, down):
    """The shares are those of the global batch, but the scores are those of this device's tokens: average both."""
    scores, gates = _route(x, router)
    share = lax.pmean((gates > 0).mean(0) / CHOICES, "dp")
    return _with(x, router, up, down, balance=gates.shape[1] * (share * scores.mean(0)).sum())


def balance_of_sums(x, router, up, down):
    """The shares and the scores were added over dp; they are means: use pmean."""
    scores, gates = _route(x, router)
    return _with(x, router, up, down, balance=lax.axis_size("dp") ** 2 * _balance(scores, gates))


def balance_of_local_experts(x, router, up, down):
    """The balance loss was multiplied by the number of this device's experts: E is the number of all of them."""
    scores, gates = _route(x, router)
    return _with(x, router, up, down, balance=_balance(scores, gates) / lax.axis_size("mp"))


MISTAKES = (
    not_summed, averaged, first_gates, chosen_on_the_device, divided_on_the_device, scores_as_gates, summed_over_dp,
    balance_of_each_device, balance_of_local_tokens, balance_with_local_scores, balance_of_sums,
    balance_of_local_experts,
)  # fmt: skip
