"""The data of a user's task: its own arrays, in place of text."""

import functools

from shardformer.config import Config
from shardformer.data import Data
from shardformer.data.own_batches import OwnBatches
from shardformer.errors import UsageError
from shardformer.model.task import check_batch, find_batch_shapes, name_task, open_task
from shardformer.training.evaluation import Evaluator
from shardformer.training.host_feature import HostFeature
from shardformer.training.run_folder import Run


class TaskData(HostFeature):
    """The batches of a user's task, or those that are given instead; each is checked."""

    def __init__(self, config: Config):
        self._task = open_task(config)

    def open_data(self, config: Config, given: Data | None) -> OwnBatches:
        task, count = self._task, config.training.batch
        if given is None:
            name, held_out = name_task(task), task.validation(count)
            given = OwnBatches(lambda first_step: task.batches(first_step, count), validation=held_out, name=name)
        if not isinstance(given, OwnBatches):
            raise UsageError(f"a task reads arrays, and {given.name} has text; give OwnBatches, or Task.batches")
        return given.with_check(functools.partial(check_batch, shapes=find_batch_shapes(task, count)))

    def prepare_evaluation(self, run: Run, evaluator: Evaluator) -> None:
        """Replaces the batches by those of the evaluation, whose rows are rounded up to the mesh."""
        evaluator.corpus = self.open_data(run.config, None)
