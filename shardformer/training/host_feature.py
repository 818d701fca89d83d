"""The work of a feature on the host, between the steps of a run. `features_on_host.py` chooses the features."""

import math
from collections.abc import Callable
from typing import Any

import jax

from shardformer.config import Config
from shardformer.data import Data
from shardformer.errors import RunError
from shardformer.training.evaluation import Evaluator
from shardformer.training.outputs import Outputs
from shardformer.training.run_folder import Run
from shardformer.training.step import StepMetrics, TrainState


class HostFeature:
    """A feature that is on. Its methods, in the order in which a run calls them, do nothing by default."""

    def __init__(self, config: Config):
        """Opens what only a start names, such as code, before the data are read, which may take hours."""

    def open_data(self, config: Config, given: Data | None) -> Data | None:
        """Returns the data that this feature brings, or those that are given; None: those that data= names."""
        return given

    def check(self, run: Run, corpus: Data) -> None:
        """Raises UsageError for what the run's tokens or its first row show to be wrong, before JAX starts."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        """Prepares the training that starts from `state`. Every process calls it.

        May replace the trainer and the data, which are those of the evaluator.
        """

    def prepare_evaluation(self, run: Run, evaluator: Evaluator) -> None:
        """Prepares an evaluation without training, as `prepare` does; `run` has the settings of the evaluation."""

    def open(self, run: Run, first_step: int) -> None:
        """Opens the files of the feature, of which the rows after `first_step` are dropped. Every process calls it."""

    def before_logged_step(self, state: TrainState, batch: Any, step: int, outputs: Outputs) -> None:
        """Measures a step that will be logged, before it is dispatched."""

    def after_step(self, row: dict, metrics: jax.Array, state: TrainState, outputs: Outputs) -> dict:
        """Returns the row of a step that has ended, for metrics.csv; raises for a step that ends or rewinds the run.

        `metrics` are the step's on the devices, `state` is that of the last dispatched step.
        """
        return row

    def after_evaluation(self, state: TrainState, step: int, outputs: Outputs) -> None:
        """Observes the state that was evaluated, after its row and its checkpoint."""


class GoBack(Exception):
    """A request to continue after `step` with the state that `restore` returns, without any step in flight."""

    def __init__(self, step: int, restore: Callable[[], TrainState]):
        super().__init__(step)
        self.step, self.restore = step, restore


class EndAtNonFinite(HostFeature):
    """The end of a run at a step whose metrics are not finite."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        self._evaluator = evaluator

    def after_step(self, row: dict, metrics: jax.Array, state: TrainState, outputs: Outputs) -> dict:
        measured = {name: row[name] for name in StepMetrics._fields if row[name] is not None}  # a task has not all
        broken = [name for name, value in measured.items() if not math.isfinite(value)]
        if not broken:
            return row
        problem = f"step {row['step']}: {', '.join(f'{name} is {row[name]}' for name in broken)}"
        advice = "A smaller lr or clip, a longer warmup or dtype=float32 may help"
        if not {"loss", "z_loss", "accuracy", "grad_norm"} & set(broken):
            raise RunError(
                f"{problem}. The step was applied, so its state is not saved; resume continues from the newest "
                f"checkpoint. {advice}"
            )
        from shardformer.training.non_finite import describe_first_non_finite  # not imported for finite losses

        outputs.checkpoints.save_last_state(state)
        cause = describe_first_non_finite(self._evaluator, state, row["step"])
        raise RunError(
            f"{problem}{cause}. The step was not applied; the last finite state is saved as step "
            f"{int(state.step)}. {advice}. If the loss was already rising, resume from an earlier checkpoint"
        )
