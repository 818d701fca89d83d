"""The schedule of pipeline stages over `pp`: each stage works on one microbatch, and the others on others.

With several rounds a stage holds as many parts of the layers, and each microbatch passes it once for each part. The
stages then idle for a shorter time at the beginning and at the end.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config.names import PP


def count_ticks(microbatches: int, pp: int, rounds: int = 1) -> int:
    """Returns the ticks of a schedule; each stage works in all but pp - 1 of them, the bubble."""
    return rounds * microbatches + pp - 1


def run_stages(stage: Callable, rows, count: int, rounds: int = 1):
    """Returns the rows of this shard after all stages in all rounds, run as `count` microbatches.

    `stage(rows, round)` maps a tree of arrays that lead with rows to a similar tree. At every tick each stage computes
    a microbatch and sends it to the next stage; results of the bubble are thrown away. A second ring turns the other
    way: it brings microbatches to the first stage, each from its shard, and returns finished ones to their shards.
    """
    pp, is_first = lax.axis_size(PP), lax.axis_index(PP) == 0
    onward, backward = [(s, (s + 1) % pp) for s in range(pp)], [((s + 1) % pp, s) for s in range(pp)]

    def choose(on_first, on_others):
        return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), on_first, on_others)

    def exchange(tick, arrived, waiting):
        """Returns the stage's next microbatch; the first stage swaps a new one for one that is finished."""
        slot = (tick // (pp * rounds) * pp + tick % pp) % count
        fresh = jax.tree.map(lambda x: _part(x, slot), waiting)
        moved = _send(choose(arrived, fresh), backward)
        waiting = jax.tree.map(lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0), waiting, moved)
        return choose(fresh, arrived), waiting

    def keep(tick, arrived, waiting):
        """Returns the microbatch that came from the previous stage (in later rounds, from the last to the first)."""
        return arrived, waiting

    def work(carry, tick):
        entering, waiting = carry
        if rounds == 1:
            entering, waiting = exchange(tick, entering, waiting)
        else:
            entering, waiting = lax.cond(tick // pp % rounds == 0, exchange, keep, tick, entering, waiting)
        done = stage(entering, (tick - lax.axis_index(PP)) // pp % rounds)
        return (_send(done, onward), waiting), None

    waiting = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    anything = jax.tree.map(lambda x: x[0], waiting)  # for the bubble
    ticks = count_ticks(count * pp, pp, rounds)
    carry, _ = lax.scan(work, (anything, waiting), jnp.arange(ticks))
    _, waiting = exchange(ticks, *carry)
    return jax.tree.map(lambda x, row: jnp.roll(x, -pp, axis=0).reshape(row.shape), waiting, rows)


def deal(stacked, rounds: int) -> Callable:
    """Returns the layers of this stage as a function of the round, in float32.

    In memory the layers keep their order, so that arrays are equal on every mesh: stage s stores the parts
    s * rounds, s * rounds + 1... of all. It works on the parts s, pp + s, 2 * pp + s... Each part crosses the wire
    once, and its gradient once on the way back.
    """
    if rounds == 1:
        own = _widen(stacked)
        return lambda turn: own
    pp, stage = lax.axis_size(PP), lax.axis_index(PP)
    parts = jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), stacked)
    received = []
    sent_is, arrival = _plan_deal(pp, rounds)
    for sent in sent_is:
        own = jax.tree.map(lambda x, sent=sent: _part(x, jnp.array(sent)[stage]), parts)
        received.append(_send(own, [(s, (s * rounds + part) % pp) for s, part in enumerate(sent)]))
    dealt = _widen(jax.tree.map(lambda *parts: jnp.stack(parts), *received))
    return lambda turn: jax.tree.map(lambda x: _part(x, jnp.array(arrival)[stage, turn]), dealt)


def _plan_deal(pp: int, rounds: int) -> tuple[list[list[int]], np.ndarray]:
    """Returns each exchange's parts, by the stage that sends them, and the exchange that brings a part, [stage, round].

    In one exchange no two stages send to the same stage.
    """
    sent_is, arrival = [], np.zeros((pp, rounds), np.int32)
    for i in range(rounds):
        sent = [(i + s // (pp // math.gcd(pp, rounds))) % rounds for s in range(pp)]
        numbers = [s * rounds + part for s, part in enumerate(sent)]
        arrival[[n % pp for n in numbers], [n // pp for n in numbers]] = i
        sent_is.append(sent)
    return sent_is, arrival


def _widen(tree):
    """Converts to float32, in which the loop over ticks adds up a parameter's gradients."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _part(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _send(tree, pairs):
    return jax.tree.map(lambda x: lax.ppermute(x, PP, pairs), tree)
