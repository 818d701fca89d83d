"""`skip_steps` on the host: the log of left-out steps, and the return of a run to an earlier checkpoint."""

import functools
import json
import math
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardformer import checkpoint
from shardformer.config.training_keys import ROLLBACKS, SKIP_LIMIT
from shardformer.devices import processes, programs
from shardformer.errors import RunError
from shardformer.logs.csv_file import CsvFile
from shardformer.messages import log
from shardformer.training.checkpoint_progress import is_scheduled, select_earlier
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import GoBack, HostFeature
from shardformer.training.non_finite import describe_first_non_finite
from shardformer.training.outputs import Outputs
from shardformer.training.rolling_guard import Verdict
from shardformer.training.run_folder import Run, Starter
from shardformer.training.step import TrainState

MOST_TRIED = 100  # checkpoints; a text between processes holds 2 kB
COLUMNS = ("step", "loss", "grad_norm", *Verdict._fields)


class SkippedSteps(HostFeature):
    """The steps that skip_steps left out, in `skipped.csv` with the bounds that they exceeded."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        self._run, self._evaluator = run, evaluator

    def open(self, run: Run, first_step: int) -> None:
        def open_file() -> CsvFile | None:
            if jax.process_index():
                return None
            file = CsvFile(run.records / "skipped.csv", COLUMNS)
            file.begin(first_step)
            return file

        self._file = processes.succeed_or_fail_together(open_file)

    def after_step(self, row: dict, metrics: jax.Array, state: TrainState, outputs: Outputs) -> dict:
        """Logs the step if it was left out. Raises GoBack if as many as SKIP_LIMIT in a row were."""
        verdict = Verdict.read(metrics)
        if not verdict.in_row:
            return row
        problem = self._describe(row, verdict, state)
        log.info(f"step {row['step']} is left out, {verdict.skipped:.0f} so far: {problem}")
        if self._file:
            left_out = {"step": row["step"], "loss": row["loss"], "grad_norm": row["grad_norm"]}
            self._file.append(left_out | verdict._asdict())
        if verdict.in_row >= SKIP_LIMIT:
            record = jax.tree.map(np.asarray, state.guard)
            restore = functools.partial(_restore_as, self._run, self._evaluator.trainer, row["step"], record)
            raise GoBack(row["step"], restore)
        return {name: value if value is not None and math.isfinite(value) else None for name, value in row.items()}

    def _describe(self, row: dict[str, Any], verdict: Verdict, state: TrainState) -> str:
        if not math.isfinite(row["loss"]) or not math.isfinite(row["grad_norm"]):
            cause = describe_first_non_finite(self._evaluator, state, row["step"])
            return f"loss is {row['loss']}, grad_norm is {row['grad_norm']}{cause}"
        bounds = {"loss": verdict.loss_bound, "grad_norm": verdict.grad_norm_bound}
        above = {name: bound for name, bound in bounds.items() if row[name] > bound}
        return ", ".join(f"{name} is {row[name]:.4g}, its bound {bound:.4g}" for name, bound in above.items())


def _restore_as(run: Run, trainer: Starter, step: int, record: dict) -> Any:
    """Returns the state of an earlier checkpoint as that of `step`: the batches in between are left out.

    The checkpoint is older than the first left-out step's weights. A run that goes back again before it has applied a
    step restores an older checkpoint.
    """
    counts = {name: int(value) for name, value in record.items() if name != "values"}
    bad = f"{SKIP_LIMIT} steps in a row up to step {step} were left out"
    if counts["rollbacks"] >= ROLLBACKS:
        raise RunError(
            f"{bad}, and the run has gone back {counts['rollbacks']} times. A smaller lr, a longer "
            "warmup or a larger skip_steps may help; skipped.csv lists the steps that were left out"
        )
    before = step - SKIP_LIMIT
    if counts["rollbacks"] and before <= counts["went_back_at"]:
        before = counts["went_back_to"]
    restored, state = _restore_earlier(run, trainer, before)
    log.info(
        f"{bad}: the run goes back to the weights of step {restored} and continues after step {step} "
        f"({counts['rollbacks'] + 1} of at most {ROLLBACKS})"
    )
    news = {"in_row": 0, "skipped": counts["skipped"], "rollbacks": counts["rollbacks"] + 1}
    news |= {"went_back_at": step, "went_back_to": restored}
    shardings = jax.tree.map(lambda leaf: leaf.sharding, (state.step, state.guard))
    renew = programs.jit(lambda step, record, news: (step, record | news), out_shardings=shardings)
    now, record = renew(np.int32(step), state.guard, {name: np.int32(value) for name, value in news.items()})
    return state._replace(step=now, guard=record)


def _restore_earlier(run: Run, trainer: Starter, before: int) -> tuple[int, Any]:
    """Returns the newest valid checkpoint by schedule before a step; the first state if none was due yet."""
    earlier = select_earlier(checkpoint.list_steps(run.out), before, run.config)[:MOST_TRIED]
    for step in json.loads(processes.text_of_first_process(json.dumps(earlier))):
        state = run.restore_step(trainer, step)
        if state is not None:
            return step, state
    first = run.config.training.base_step
    if any(is_scheduled(step, run.config) for step in range(first + 1, before)):
        raise RunError(
            f"{run.out} has no valid checkpoint from before step {before} to go back to; give a larger keep, "
            "or resume with skip_steps=0"
        )
    return first, run.make_first_state(trainer)
