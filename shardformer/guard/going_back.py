"""The return of a run to a checkpoint, after several steps in a row were left out."""

import json
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from shardformer import checkpoint, programs
from shardformer.distributed import processes
from shardformer.errors import RunError
from shardformer.run import Run
from shardformer.run.rollback_steps import is_scheduled, select_earlier
from shardformer.run.run_folder import Starter

Say = Callable[[str], None]


class Stuck(Exception):
    """The last skip_limit steps were left out. `record` is the guard's record on the host."""

    def __init__(self, step: int, record: dict):
        super().__init__(step)
        self.step, self.record = step, record


def go_back(run: Run, evaluator: Any, checkpoints: Any, step: int, record: dict, say: Say) -> tuple[Any, Iterator]:
    """Returns the state of an earlier checkpoint as that of `step`, and the batches after it.

    The batches in between are left out. After the last step, saves the state.
    """
    trainer, c = evaluator.trainer, run.config
    checkpoints.wait()
    state = _restore_as(run, trainer, step, record, say)
    if step == c.steps:
        checkpoints.save_last_state(state)
    return state, evaluator.corpus.train_batches(c, step, trainer.local_rows)


def _restore_as(run: Run, trainer: Starter, step: int, record: dict, say: Say) -> Any:
    """Returns the state of an earlier checkpoint as that of `step`.

    The checkpoint is older than the first left-out step's weights. A run that goes back again before it has applied a
    step takes an older checkpoint.
    """
    c, counts = run.config, {name: int(value) for name, value in record.items() if name != "values"}
    bad = f"{c.skip_limit} steps in a row up to step {step} were left out"
    if counts["rollbacks"] >= c.rollbacks:
        raise RunError(
            f"{bad}, and the run has gone back {counts['rollbacks']} times (rollbacks={c.rollbacks}). A smaller lr, a "
            "longer warmup or a larger skip_steps may help; skipped.csv lists the steps that were left out"
        )
    before = step - c.skip_limit
    if counts["rollbacks"] and before <= counts["went_back_at"]:
        before = counts["went_back_to"]
    found, state = _restore_earlier(run, trainer, before)
    say(
        f"{bad}: the run goes back to the weights of step {found} and continues after step {step} "
        f"({counts['rollbacks'] + 1} of at most rollbacks={c.rollbacks})"
    )
    news = {"in_row": 0, "skipped": counts["skipped"], "rollbacks": counts["rollbacks"] + 1}
    news |= {"went_back_at": step, "went_back_to": found}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.step, state.guard))
    renew = programs.jit(lambda step, record, news: (step, record | news), out_shardings=shardings)
    now, record = renew(np.int32(step), state.guard, {name: np.int32(value) for name, value in news.items()})
    return state._replace(step=now, guard=record)


def _restore_earlier(run: Run, trainer: Starter, before: int) -> tuple[int, Any]:
    """Returns the newest sound checkpoint by schedule before a step; the first state if none was due yet."""
    stored = json.loads(processes.text_of_first_process(json.dumps(checkpoint.list_steps(run.out))))
    for step in select_earlier(stored, before, run.config):
        state = run.restore_step(trainer, step)
        if state is not None:
            return step, state
    first = run.config.from_step
    if any(is_scheduled(step, run.config) for step in range(first + 1, before)):
        raise RunError(
            f"{run.out} has no sound checkpoint from before step {before} to go back to; give a larger keep, "
            "or resume with skip_steps=0"
        )
    return first, run.make_first_state(trainer)
