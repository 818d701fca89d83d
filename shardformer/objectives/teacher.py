"""The teacher of a distillation: its weights on the run's devices, the same in every start of the run."""

from collections.abc import Callable

from jax.sharding import PartitionSpec as P

from shardformer.devices import processes
from shardformer.errors import UsageError
from shardformer.messages import log
from shardformer.objectives.weight_digests import check_weights, digest_weights
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run
from shardformer.training.step import TrainState

FILE = "teacher.json"


class Teacher(HostFeature):
    """The teacher's best weights, which each step needs."""

    def prepare(self, run: Run, evaluator: Evaluator, state: TrainState, is_stopped: Callable[[], bool]) -> None:
        """Loads the weights; raises RunError if they are not those of the run's first start."""
        teacher = Run.open(run.config.preferences.teacher)
        if teacher.vocabulary.without_options().sha256 != run.vocabulary.without_options().sha256:
            raise UsageError(
                f"teacher={teacher.out} has tokenizer={teacher.vocabulary.name}, and this run "
                f"tokenizer={run.vocabulary.name}: distributions over different tokens; give tokenizer= of the teacher"
            )
        trainer = evaluator.trainer
        step, params = teacher.restore_params(trainer.model.teacher)  # type: ignore[attr-defined]
        weights = digest_weights(params, trainer.model.sharding(P()))
        name = f"teacher={run.config.preferences.teacher}"
        processes.run_on_first_process(lambda: check_weights(run, FILE, name, weights, step))
        trainer.constants["teacher"] = params
        log.info(f"teacher: step {step} of {teacher.out}, weights {weights[:12]}")
