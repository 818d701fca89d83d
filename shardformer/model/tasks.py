"""The tasks: the class of each objective by its name."""

import importlib

from shardformer.config import Config
from shardformer.model.task_on_mesh import TaskOnMesh

PAIRS = "preference_model:PreferenceModel"
# Imported where an objective asks for one: a plain run has neither pairs nor a teacher.
CLASSES = {
    "lm": "model:Model",
    "distill": "distillation_model:DistillationModel",
    "grpo": "policy_model:PolicyModel",
    "task": "own_task:OwnTask",
}


def choose_task(config: Config) -> type[TaskOnMesh]:
    """Returns the class of the task that a configuration trains."""
    module, _, name = CLASSES.get(config.preferences.objective, PAIRS).partition(":")
    return getattr(importlib.import_module(f"shardformer.model.{module}"), name)
