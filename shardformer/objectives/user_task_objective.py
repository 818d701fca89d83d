"""The objective of a user's task, and the keys that act on it."""

from typing import TYPE_CHECKING

from shardformer.config.keys import keys_of, require
from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.run_keys import LaunchKeys, ProcessKeys, RunKeys
from shardformer.config.training_keys import BadStepKeys
from shardformer.objectives.objective import Objective

if TYPE_CHECKING:
    from shardformer.config.config import Config

OF_LANGUAGE_MODELS = {"param_dtype", "offload", "eval_tasks", "eval_limit", "eval_prompts", "reward"}
OF_ANY_TASK = {
    *(name for group in (OptimizerKeys, BadStepKeys, RunKeys, LaunchKeys, ProcessKeys) for name in keys_of(group)),
    *("mesh", "zero", "grad_dtype", "batch", "steps", "seed", "accum", "accum_mode", "ema", "objective"),
    *("vocab", "data", "tokenizer"),  # written by the run: a name of the data, without tokens
} - OF_LANGUAGE_MODELS


class UserTask(Objective):
    """A module of the user with its own loss and data, task=FILE.py:NAME: model/task.py."""

    task = "shardformer.model.own_task:OwnTask"
    host_feature = "shardformer.objectives.task_data:TaskData"
    reads_tokens = has_vocabulary = has_plain_batches = has_bound_of_bytes = False
    trained = "a task of yours"
    verified_against = "one device"
    has_dense_reference = False
    evaluation_titles = "loss", "accuracy", "rows"
    unit = "rows"

    def __init__(self, config: "Config"):
        super().__init__(config)
        self.row_tokens = 1

    def check(self) -> None:
        """Raises UsageError for a key that has no effect on a user's task, or that a task cannot have."""
        c = self.config
        for name, field in keys_of(type(c)).items():
            require(
                name in OF_ANY_TASK or c.get(name) == field.default,
                f"{name} is a key of the language model and does nothing with a task; leave it out, got "
                f"{name}={c.shown(name)}",
            )
        require(
            c.parallel.mesh == "auto" or c.parallel.pp == c.parallel.cp == 1,
            f"a task is split over dp and mp, got mesh={c.parallel.mesh}; give a mesh DPxMP",
        )
