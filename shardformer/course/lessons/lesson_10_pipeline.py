"""The ticks of a pipeline

A pipeline gives each device of the axis pp a stage of the model, here one matrix. The batch is cut into microbatches.
In tick t, stage s works on microbatch t - s, and passes the result to stage s + 1 for the next tick:

  tick      0    1    2    3    4
  stage 0  m0   m1   m2    -    -
  stage 1   -   m0   m1   m2    -
  stage 2   -    -   m0   m1   m2

With m microbatches there are m + stages - 1 ticks. A stage without a microbatch still computes, because all devices
run one program; nobody may read what it computes. The last stage finishes microbatch tick - (stages - 1).

The number of a tick is the same on all devices, so Python's `if` may test it. The number of a stage is known only on
the device: choose with `jnp.where`.
"""

import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

# %% dense
MESHES = ({"pp": 4}, {"pp": 2})
IN_SPECS = (P("pp", None, None), P())
OUT_SPECS = {"y": P()}


def work(matrix, rows):
    return jnp.tanh(rows @ matrix)


def dense(matrices, microbatches):
    y = microbatches
    for matrix in matrices:
        y = work(matrix, y)
    return {"y": y}


# %% shard
def on_shard(matrices, microbatches):
    # Blocks: matrices [1, d, d], where matrices[0] is this stage's; microbatches [m, rows, d] in full.
    stage, stages, m = lax.axis_index("pp"), lax.axis_size("pp"), len(microbatches)
    to_next = [(s, s + 1) for s in range(stages - 1)]
    received, y = jnp.zeros_like(microbatches[0]), jnp.zeros_like(microbatches)
    for tick in range(m + stages - 1):
        # solution
        rows = jnp.where(stage == 0, microbatches[min(tick, m - 1)], received)
        done = work(matrices[0], rows)
        finished = tick - (stages - 1)
        if finished >= 0:
            y = y.at[finished].set(done)
        received = lax.ppermute(done, "pp", to_next)
        # hole: Choose this stage's rows and work on them. If tick - (stages - 1) is not negative, store the result
        # hole: there in y, on every stage (only the last stage's y is used below). Then send the result on.
        # hole: lax.ppermute(value, "pp", to_next) sends to the next stage; the first one receives zeros.
    # Only the last stage has finished rows; the sum gives them to every stage.
    return {"y": lax.psum(jnp.where(stage == stages - 1, y, 0), "pp")}


# %% checks
def make_arguments(draw, sizes):
    matrices = 0.7 * draw.normal(size=(sizes["pp"], 4, 4))
    return matrices.astype("float32"), draw.normal(size=(5, 3, 4)).astype("float32")


def _run(matrices, microbatches, choose, store, pairs=None):
    """Runs the ticks with another choice of the rows and another place to store them."""
    stage, stages, m = lax.axis_index("pp"), lax.axis_size("pp"), len(microbatches)
    pairs = pairs or [(s, s + 1) for s in range(stages - 1)]
    received, y = jnp.zeros_like(microbatches[0]), jnp.zeros_like(microbatches)
    for tick in range(m + stages - 1):
        done = work(matrices[0], choose(tick, stage, received))
        index = store(tick, stages)
        if 0 <= index < m:
            y = y.at[index].set(done)
        received = lax.ppermute(done, "pp", pairs) if pairs != "none" else done
    return {"y": lax.psum(jnp.where(stage == stages - 1, y, 0), "pp")}


def _choose(microbatches):
    last = len(microbatches) - 1
    return lambda tick, stage, received: jnp.where(stage == 0, microbatches[min(tick, last)], received)


def stored_at_the_tick(matrices, microbatches):
    """The results are stored at the number of the tick: the last stage finishes microbatch tick - (stages - 1)."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: tick)


def stored_one_tick_late(matrices, microbatches):
    """The results are stored one microbatch too early: off by one tick. The last stage finishes microbatch
    tick - (stages - 1), not tick - stages."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: tick - stages)


def stored_one_tick_early(matrices, microbatches):
    """The results are stored one microbatch too late: off by one tick. The last stage finishes microbatch
    tick - (stages - 1), not tick - (stages - 2)."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: tick - (stages - 2))


def every_stage_reads_the_batch(matrices, microbatches):
    """Every stage works on the microbatches themselves: only stage 0 reads the batch, the others work on what they
    received."""
    last = len(microbatches) - 1
    return _run(
        matrices, microbatches, lambda tick, stage, received: microbatches[min(tick, last)],
        lambda tick, stages: tick - (stages - 1),
    )  # fmt: skip


def first_stage_reads_what_it_received(matrices, microbatches):
    """No stage reads the batch: stage 0 must take microbatch `tick`, as it receives only zeros."""
    return _run(
        matrices, microbatches, lambda tick, stage, received: received, lambda tick, stages: tick - (stages - 1)
    )


def sent_backwards(matrices, microbatches):
    """The results were sent to the stage before: pairs are (sender, receiver), so send from s to s + 1."""
    pairs = [(s + 1, s) for s in range(lax.axis_size("pp") - 1)]
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: tick - (stages - 1), pairs)


def nothing_sent(matrices, microbatches):
    """`y` is zero: nothing reached the last stage, or nothing was stored. Send the result of each tick with
    lax.ppermute, and keep the new array: y = y.at[...].set(...)."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: tick - (stages - 1), "none")


def same_microbatch_in_each_tick(matrices, microbatches):
    """Stage 0 works on microbatch 0 in every tick: it must take microbatch `tick`."""
    return _run(
        matrices, microbatches, lambda tick, stage, received: jnp.where(stage == 0, microbatches[0], received),
        lambda tick, stages: tick - (stages - 1),
    )  # fmt: skip


def first_result_lost(matrices, microbatches):
    """Microbatch 0 is lost: the last stage finishes it in tick stages - 1, so store if tick - (stages - 1) >= 0."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: (tick - stages + 1) or -1)


def stored_late_and_first_lost(matrices, microbatches):
    """The results are stored off by one tick: the last stage finishes microbatch tick - (stages - 1), not
    tick - stages."""
    return _run(matrices, microbatches, _choose(microbatches), lambda tick, stages: (tick - stages) or -1)


def local_microbatch_of_the_batch(matrices, microbatches):
    """Every stage takes its microbatch from the batch: only stage 0 reads it. The others work on what they received,
    which the stage before has worked on."""
    last = len(microbatches) - 1
    return _run(
        matrices, microbatches, lambda tick, stage, received: microbatches[jnp.clip(tick - stage, 0, last)],
        lambda tick, stages: tick - (stages - 1),
    )  # fmt: skip


def received_is_stored(matrices, microbatches):
    """The received rows are stored: store the result of the last stage's own work."""
    stage, stages, m = lax.axis_index("pp"), lax.axis_size("pp"), len(microbatches)
    received, y = jnp.zeros_like(microbatches[0]), jnp.zeros_like(microbatches)
    for tick in range(m + stages - 1):
        done = work(matrices[0], _choose(microbatches)(tick, stage, received))
        if tick >= stages - 1:
            y = y.at[tick - stages + 1].set(received)
        received = lax.ppermute(done, "pp", [(s, s + 1) for s in range(stages - 1)])
    return {"y": lax.psum(jnp.where(stage == stages - 1, y, 0), "pp")}


MISTAKES = (
    stored_at_the_tick, stored_one_tick_late, stored_one_tick_early, every_stage_reads_the_batch,
    first_stage_reads_what_it_received, sent_backwards, nothing_sent, same_microbatch_in_each_tick,
    first_result_lost, stored_late_and_first_lost, local_microbatch_of_the_batch, received_is_stored,
)  # fmt: skip
