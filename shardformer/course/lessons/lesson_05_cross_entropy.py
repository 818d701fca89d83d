"""The cross-entropy without gathered logits

The logits of a batch are often the largest array of a training step: rows x vocabulary. With the head split over the
vocabulary, each device holds the logits of its own tokens. Gathering them would send rows x vocabulary numbers. The
cross-entropy needs three numbers a row:

  m      the largest logit, so that no exponential overflows
  total  the sum of exp(logit - m)
  right  the logit of the target token

and loss = log(total) + m - right. A device that does not hold the target's logit must add 0. (Beware:
`jnp.take_along_axis` gives NaN for an index outside of the block.)
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"dp": 2, "mp": 4}, {"dp": 1, "mp": 4})
IN_SPECS = (P("dp", "mp"), P("dp"))
OUT_SPECS = {"losses": P("dp")}


def dense(logits, targets):
    right = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return {"losses": jax.nn.logsumexp(logits, axis=1) - right}


# %% shard
def on_shard(logits, targets):
    # Blocks: logits [rows / dp, vocabulary / mp], targets [rows / dp].
    # solution
    m = lax.pmax(logits.max(axis=1), "mp")
    total = lax.psum(jnp.exp(logits - m[:, None]).sum(axis=1), "mp")
    width = logits.shape[1]
    local = targets - width * lax.axis_index("mp")
    is_here = (local >= 0) & (local < width)
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[:, None], axis=1)[:, 0]
    right = lax.psum(jnp.where(is_here, picked, 0), "mp")
    losses = jnp.log(total) + m - right
    # hole: Compute the losses [rows / dp] from m, total and right; the largest value over mp is lax.pmax.
    return {"losses": losses}


# %% checks
def make_arguments(draw, sizes):
    logits = 40 * draw.normal(size=(8, 32)).astype("float32")
    return logits, draw.integers(0, 32, 8).astype("int32")


def _pick(logits, targets, offset):
    width = logits.shape[1]
    local = targets - offset
    is_here = (local >= 0) & (local < width)
    picked = jnp.take_along_axis(logits, jnp.clip(local, 0, width - 1)[:, None], axis=1)[:, 0]
    return jnp.where(is_here, picked, 0), picked


def _log_total(logits):
    m = lax.pmax(logits.max(axis=1), "mp")
    return jnp.log(lax.psum(jnp.exp(logits - m[:, None]).sum(axis=1), "mp")) + m


def local_maximum(logits, targets):
    """Each device subtracted its own largest logit, so the devices' exponentials have different scales and must not be
    added: take the largest over mp with lax.pmax."""
    m = logits.max(axis=1)
    total = lax.psum(jnp.exp(logits - m[:, None]).sum(axis=1), "mp")
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": jnp.log(total) + m - lax.psum(masked, "mp")}


def sum_of_logarithms(logits, targets):
    """The logarithms of the devices' totals were added. Add the totals first, then take the logarithm."""
    m = lax.pmax(logits.max(axis=1), "mp")
    total = jnp.exp(logits - m[:, None]).sum(axis=1)
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": lax.psum(jnp.log(total), "mp") + m - lax.psum(masked, "mp")}


def local_total(logits, targets):
    """`total` holds only the exponentials of this device's tokens: a psum over mp is missing."""
    m = lax.pmax(logits.max(axis=1), "mp")
    total = jnp.exp(logits - m[:, None]).sum(axis=1)
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": jnp.log(total) + m - lax.psum(masked, "mp")}


def local_target(logits, targets):
    """`right` is known only to the device that holds the target's logit; the others subtract 0: a psum over mp is
    missing."""
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": _log_total(logits) - masked}


def target_without_offset(logits, targets):
    """The target's logit was looked up as if this device's block began at token 0: subtract the first token of this
    device."""
    masked, _ = _pick(logits, targets, 0)
    return {"losses": _log_total(logits) - lax.psum(masked, "mp")}


def target_without_mask(logits, targets):
    """The target's logit was added on every device: a device that does not hold the target must add 0."""
    _, picked = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": _log_total(logits) - lax.psum(picked, "mp")}


def maximum_lost(logits, targets):
    """The largest logit was subtracted before the exponential, but not added again after the logarithm."""
    m = lax.pmax(logits.max(axis=1), "mp")
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": _log_total(logits) - m - lax.psum(masked, "mp")}


def target_outside_of_the_block(logits, targets):
    """The target's logit was looked up outside of this device's block, where take_along_axis gives NaN. Subtract the
    first token of this device, clip the index, and let the devices without the target add 0."""
    right = jnp.take_along_axis(logits, targets[:, None], axis=1)[:, 0]
    return {"losses": _log_total(logits) - lax.psum(right, "mp")}


def no_maximum(logits, targets):
    """The exponentials overflow: subtract the largest logit over mp, m, before the exponential."""
    total = lax.psum(jnp.exp(logits).sum(axis=1), "mp")
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": jnp.log(total) - lax.psum(masked, "mp")}


def sum_of_losses(logits, targets):
    """The losses of all devices were added: log(total) and m are the same on every device and must count once. Add
    only `total` and `right` over mp."""
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": lax.psum(_log_total(logits) - masked, "mp")}


def nothing_added(logits, targets):
    """Nothing was added over mp: every device has the loss of its own part of the vocabulary. `total` and `right` each
    need a psum over mp."""
    masked, _ = _pick(logits, targets, logits.shape[1] * lax.axis_index("mp"))
    return {"losses": jax.nn.logsumexp(logits, axis=1) - masked}


MISTAKES = (
    local_maximum, sum_of_logarithms, local_total, local_target, target_without_offset, target_without_mask,
    maximum_lost,
    target_outside_of_the_block, no_maximum, sum_of_losses,
    nothing_added,
)  # fmt: skip
