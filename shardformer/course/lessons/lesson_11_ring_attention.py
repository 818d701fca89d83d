"""Ring attention

Split the tokens of one long text over the devices of an axis cp. Each device holds the queries, keys and values of its
own tokens. Every query needs every earlier key, but not all at once: keys and values travel around a ring, and a
device works on one block while it has it.

The softmax is merged as the blocks come. Each query keeps

  m        the largest score so far
  total    the sum of exp(score - m)
  weighted the sum of exp(score - m) * value

When a block raises m, the old total and the old weighted sum are multiplied by exp(old m - new m). After all blocks
the result is weighted / total.

In step t, device i holds the block of device i - t (in a ring), because each step every block moves to the next
device.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"cp": 4}, {"cp": 2})
IN_SPECS = (P("cp", None), P("cp", None), P("cp", None))
OUT_SPECS = {"y": P("cp", None)}


def mask_scores(scores, query_positions, key_positions):
    """Gives the scores [queries, keys] of later keys the value -1e9."""
    return jnp.where(query_positions[:, None] >= key_positions[None, :], scores, -1e9)


def dense(q, k, v):
    positions = jnp.arange(len(q))
    scores = mask_scores(q @ k.T, positions, positions)
    weights = jnp.exp(scores - scores.max(axis=1, keepdims=True))
    return {"y": weights @ v / weights.sum(axis=1, keepdims=True)}


# %% shard
def on_shard(q, k, v):
    # Blocks: q, k and v [tokens / cp, d].
    n, devices, index = len(q), lax.axis_size("cp"), lax.axis_index("cp")
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    m, total, weighted = jnp.full(n, -1e9), jnp.zeros(n), jnp.zeros_like(v)
    for step in range(devices):
        # solution
        owner = (index - step) % devices
        scores = mask_scores(q @ k.T, n * index + jnp.arange(n), n * owner + jnp.arange(n))
        new_m = jnp.maximum(m, scores.max(axis=1))
        rescale = jnp.exp(m - new_m)
        weights = jnp.exp(scores - new_m[:, None])
        total = total * rescale + weights.sum(axis=1)
        weighted = weighted * rescale[:, None] + weights @ v
        m = new_m
        if step + 1 < devices:
            k, v = lax.ppermute((k, v), "cp", to_next)
        # hole: Merge the block of this step into m, total and weighted, and send k and v to the next device.
    return {"y": weighted / total[:, None]}


# %% checks
def make_arguments(draw, sizes):
    return tuple(2 * draw.normal(size=(16, 4)).astype("float32") for _ in range(3))


def _ring(q, k, v, find_owner, steps=None, rescaled=True, moved="kv", rescale_total=True, first=0):
    """Runs the ring with one part of it changed."""
    n, devices, index = len(q), lax.axis_size("cp"), lax.axis_index("cp")
    m, total, weighted = jnp.full(n, -1e9), jnp.zeros(n), jnp.zeros_like(v)
    to_next = [(i, (i + 1) % devices) for i in range(devices)]
    for step in range(steps or devices):
        if step >= first:
            positions = n * find_owner(index, step, devices) + jnp.arange(n)
            scores = mask_scores(q @ k.T, n * index + jnp.arange(n), positions)
            new_m = jnp.maximum(m, scores.max(axis=1))
            rescale = jnp.exp(m - new_m) if rescaled else jnp.ones(n)
            weights = jnp.exp(scores - new_m[:, None])
            total = total * (rescale if rescale_total else 1) + weights.sum(axis=1)
            weighted, m = weighted * rescale[:, None] + weights @ v, new_m
        k = lax.ppermute(k, "cp", to_next) if "k" in moved else k
        v = lax.ppermute(v, "cp", to_next) if "v" in moved else v
    return {"y": weighted / total[:, None]}


def _owner(index, step, devices):
    return (index - step) % devices


def one_block_missed(q, k, v):
    """One block was missed: there are cp steps, the first with the device's own block."""
    return _ring(q, k, v, _owner, steps=lax.axis_size("cp") - 1)


def local_block_missed(q, k, v):
    """The device's own block was missed: in step 0 it holds that block, so merge it before anything is sent."""
    return _ring(q, k, v, _owner, first=1)


def one_block_twice(q, k, v):
    """One block was counted twice: after cp steps a device's own block has come back."""
    return _ring(q, k, v, _owner, steps=lax.axis_size("cp") + 1)


def not_rescaled(q, k, v):
    """The sums of the earlier blocks were not rescaled when m rose: multiply total and weighted by
    exp(old m - new m)."""
    return _ring(q, k, v, _owner, rescaled=False)


def total_not_rescaled(q, k, v):
    """`weighted` was rescaled when m rose, but `total` was not: multiply both by exp(old m - new m)."""
    return _ring(q, k, v, _owner, rescale_total=False)


def owner_in_the_wrong_direction(q, k, v):
    """The positions of the keys are those of device i + step; the blocks move to the next device, so in this step
    the device holds the block of device i - step."""
    return _ring(q, k, v, lambda index, step, devices: (index + step) % devices)


def local_positions(q, k, v):
    """The keys have this device's own positions in every step, but they come from device i - step: the causal mask is
    wrong."""
    return _ring(q, k, v, lambda index, step, devices: index)


def nothing_sent(q, k, v):
    """The keys and values did not move: the device met its own block in every step. Send them with lax.ppermute."""
    return _ring(q, k, v, _owner, moved="")


def keys_only_sent(q, k, v):
    """The keys moved and the values did not: send both k and v."""
    return _ring(q, k, v, _owner, moved="k")


def values_only_sent(q, k, v):
    """The values moved and the keys did not: send both k and v."""
    return _ring(q, k, v, _owner, moved="v")


def local_block_only(q, k, v):
    """Only the device's own block was used: run cp steps, and send keys and values after each one."""
    return _ring(q, k, v, _owner, steps=1)


def no_mask(q, k, v):
    """The causal mask is missing: a query saw later keys. Mask with the positions in the full text."""
    return _ring(q, k, v, lambda index, step, devices: -1)


MISTAKES = (
    one_block_missed, local_block_missed, one_block_twice, not_rescaled, total_not_rescaled,
    owner_in_the_wrong_direction, local_positions, nothing_sent, keys_only_sent, values_only_sent,
    local_block_only, no_mask,
)  # fmt: skip
