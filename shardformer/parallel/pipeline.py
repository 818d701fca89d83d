"""The schedule of pipeline stages over `pp`: each stage works on a different microbatch.

With two or more rounds a stage has as many parts of the layers, and each microbatch passes it once for each part. The
stages then idle for a shorter time at the beginning and at the end.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config.names import PP


def count_ticks(microbatches: int, pp: int, rounds: int = 1) -> int:
    """Returns the ticks of a schedule; each stage works in all but pp - 1 of them, the bubble."""
    return rounds * microbatches + pp - 1


class Pipeline(NamedTuple):
    """The schedule of one step."""

    pp: int  # stages
    microbatches: int  # that each stage brings
    rounds: int = 1

    @property
    def ticks(self) -> int:
        return count_ticks(self.microbatches * self.pp, self.pp, self.rounds)

    @property
    def exchanges(self) -> int:
        """The ticks at which new microbatches enter, and finished ones return to their shards."""
        return sum(bool(self.exchanges_at(tick)) for tick in range(self.ticks))

    def exchanges_at(self, tick):
        """Returns whether the first stage starts a first round at a tick."""
        return tick // self.pp % self.rounds == 0


def run_stages(stage: Callable, rows, schedule: Pipeline):
    """Returns the rows of this shard after all stages in all rounds, run as microbatches.

    `stage(rows, round)` maps a tree of arrays that lead with rows to a similar tree. At every tick each stage computes
    a microbatch and sends it to the next stage; results of the bubble are thrown away. A second ring sends in the
    other direction: it brings microbatches to the first stage, each from its shard, and returns finished ones to
    their shards.
    """
    count, rounds = schedule.microbatches, schedule.rounds
    pp, is_first = lax.axis_size(PP), lax.axis_index(PP) == 0
    onward, backward = [(s, (s + 1) % pp) for s in range(pp)], [((s + 1) % pp, s) for s in range(pp)]

    def choose(on_first, on_other_stages):
        return jax.tree.map(lambda a, b: jnp.where(is_first, a, b), on_first, on_other_stages)

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
            entering, waiting = lax.cond(schedule.exchanges_at(tick), exchange, keep, tick, entering, waiting)
        done = stage(entering, (tick - lax.axis_index(PP)) // pp % rounds)
        return (_send(done, onward), waiting), None

    waiting = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    anything = jax.tree.map(lambda x: x[0], waiting)  # for the bubble
    carry, _ = lax.scan(work, (anything, waiting), jnp.arange(schedule.ticks))
    _, waiting = exchange(schedule.ticks, *carry)
    return jax.tree.map(lambda x, row: jnp.roll(x, -pp, axis=0).reshape(row.shape), waiting, rows)


def distribute(stacked, rounds: int) -> Callable:
    """Returns the layers of this stage as a function of the round, in float32.

    In memory the layers keep their order, so that arrays are equal on every mesh: stage s stores the parts
    s * rounds, s * rounds + 1... of all. It works on the parts s, pp + s, 2 * pp + s... Each part crosses the wire
    once, and its gradient once in the other direction.
    """
    if rounds == 1:
        widened = _widen(stacked)
        return lambda round_: widened
    pp, stage = lax.axis_size(PP), lax.axis_index(PP)
    parts = jax.tree.map(lambda x: x.reshape(rounds, -1, *x.shape[1:]), stacked)
    received = []
    sent_is, arrival = _plan_exchanges(pp, rounds)
    for sent in sent_is:
        part_to_send = jax.tree.map(lambda x, sent=sent: _part(x, jnp.array(sent)[stage]), parts)
        received.append(_send(part_to_send, [(s, (s * rounds + part) % pp) for s, part in enumerate(sent)]))
    distributed = _widen(jax.tree.map(lambda *parts: jnp.stack(parts), *received))
    return lambda round_: jax.tree.map(lambda x: _part(x, jnp.array(arrival)[stage, round_]), distributed)


def _plan_exchanges(pp: int, rounds: int) -> tuple[list[list[int]], np.ndarray]:
    """Returns each exchange's parts, by the stage that sends them, and the exchange that brings a part, [stage, round].

    In one exchange no two stages send to the same stage.
    """
    sent_is, arrival = [], np.zeros((pp, rounds), np.int32)
    for i in range(rounds):
        sent = [(i + s // (pp // math.gcd(pp, rounds))) % rounds for s in range(pp)]
        indices = [s * rounds + part for s, part in enumerate(sent)]
        arrival[[n % pp for n in indices], [n // pp for n in indices]] = i
        sent_is.append(sent)
    return sent_is, arrival


def _widen(tree):
    """Converts to float32, in which the loop over ticks adds up a parameter's gradients; codes have none."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x, tree)


def _part(x, index):
    return lax.dynamic_index_in_dim(x, index, keepdims=False)


def _send(tree, pairs):
    return jax.tree.map(lambda x: lax.ppermute(x, PP, pairs), tree)
