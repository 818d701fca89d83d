"""Rules of `objective=task`: a user's module has its own loss and data, and none of the language model's keys."""

from typing import TYPE_CHECKING

from shardformer.config.keys import keys_of, require
from shardformer.config.optimizer_keys import OptimizerKeys
from shardformer.config.run_keys import LaunchKeys, ProcessKeys, RunKeys
from shardformer.config.training_keys import BadStepKeys

if TYPE_CHECKING:
    from shardformer.config.config import Config

OF_LANGUAGE_MODELS = {"param_dtype", "offload", "eval_tasks", "eval_limit", "eval_prompts", "reward"}
OF_ANY_TASK = {
    *(name for group in (OptimizerKeys, BadStepKeys, RunKeys, LaunchKeys, ProcessKeys) for name in keys_of(group)),
    *("mesh", "zero", "grad_dtype", "batch", "steps", "seed", "accum", "accum_mode", "ema", "objective"),
    *("vocab", "data", "tokenizer"),  # written by the run: a name of the data, without tokens
} - OF_LANGUAGE_MODELS


def check_task(c: "Config") -> None:
    """Raises UsageError for a key that has no effect on a user's task, or that a task cannot have."""
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
