"""The schedule of stages over `pp`: while a microbatch is in one stage, those before and after it are in others.

With several rounds a stage has as many parts of the layers, and a microbatch comes by once for each: the stages are
idle for a shorter time when it begins and ends.
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config.names import PP


def count_ticks(microbatches: int, pp: int, rounds: int = 1) -> int:
    """Turns of every stage. In all but pp - 1 of them it has work to do: the others are the bubble."""
    return rounds * microbatches + pp - 1


def run_stages(stage: Callable, rows, count: int, rounds: int = 1):
    """The rows of this shard, as `count` microbatches, after every stage in every round.

    `stage(rows, round)` maps a tree of arrays that lead with rows to one like it. At every tick each stage computes a
    microbatch and sends it to the next; what it computes in the bubble is thrown away. A second ring turns the other
    way: it brings microbatches to the first stage, each from its shard, and takes finished ones back in their places.
    """
    pp, is_first = lax.axis_size(PP), lax.axis_index(PP) == 0
    onward, backward = [(s, (s + 1) % pp) for s in range(pp)], [((s + 1) % pp, s) for s in range(pp)]
    choose = lambda first, others: jax.tree.map(lambda a, b: jnp.where(is_first, a, b), first, others)

    def exchange(tick, arrived, waiting):
        """What this stage works on next. The first one puts what has been through all rounds in a new one's place."""
        slot = (tick // (pp * rounds) * pp + tick % pp) % count
        fresh = jax.tree.map(lambda x: _part(x, slot), waiting)
        moved = _send(choose(arrived, fresh), backward)
        put = lambda x, new: lax.dynamic_update_index_in_dim(x, new, slot, 0)
        return choose(fresh, arrived), jax.tree.map(put, waiting, moved)

    def work(carry, tick):
        entering, waiting = carry
        if rounds == 1:
            entering, waiting = exchange(tick, entering, waiting)
        else:  # in later rounds the first stage goes on with what comes from the last
            keep = lambda tick, *carry: carry
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
    """The layers of this stage in a round, as a function of the round.

    In memory layers lie in their order, so that arrays are the same on every mesh: stage s has parts s * rounds,
    s * rounds + 1... of all. It works on parts s, pp + s, 2 * pp + s... Each crosses the wire once, and its gradient
    once on the way back.
    """
    if rounds == 1:
        stacked = _widen(stacked)
        return lambda turn: stacked
    pp, stage = lax.axis_size(PP), lax.axis_index(PP)
    parts = jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), stacked)
    received, arrival = [], np.zeros((pp, rounds), np.int32)
    for i in range(rounds):
        sent = [(i + s // (pp // math.gcd(pp, rounds))) % rounds for s in range(pp)]  # no two to the same stage
        numbers = [s * rounds + part for s, part in enumerate(sent)]
        arrival[[n % pp for n in numbers], [n // pp for n in numbers]] = i
        own = jax.tree.map(lambda x, sent=sent: _part(x, jnp.array(sent)[stage]), parts)
        received.append(_send(own, [(s, n % pp) for s, n in enumerate(numbers)]))
    dealt = _widen(jax.tree.map(lambda *parts: jnp.stack(parts), *received))
    return lambda turn: jax.tree.map(lambda x: _part(x, jnp.array(arrival)[stage, turn]), dealt)


def _widen(tree):
    """Converts to float32, in which the loop over ticks adds up a parameter's gradients."""
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _part(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _send(tree, pairs):
    return jax.tree.map(lambda x: lax.ppermute(x, PP, pairs), tree)
