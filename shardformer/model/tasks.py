"""The tasks: each objective's class by its name, and the user's own, which each start names."""

import functools
import importlib

from shardformer.config import Config
from shardformer.data import Data, OwnBatches
from shardformer.errors import UsageError, forbid_exit
from shardformer.model.task import Task, check_batch, find_batch_shapes, name_task
from shardformer.model.task_on_mesh import TaskOnMesh
from shardformer.user_code import import_function

TAKES = "task takes FILE.py:NAME, a subclass of shardformer.Task or a function that returns one"
NEEDED = ("rows", "batches", "loss")
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


def open_task(config: Config) -> Task:
    """Returns the user's task of a configuration. Only a start names it: no stored file can have code run."""
    task = config.start.task
    if not task:
        raise UsageError(f"this run trains a task of yours, which each start names; {TAKES}")
    opened = _import_task(task) if isinstance(task, str) else task
    if not isinstance(opened, Task):
        raise UsageError(f"task is {opened!r:.100}, expected an object of a subclass of shardformer.Task")
    if missing := [name for name in NEEDED if getattr(type(opened), name) is getattr(Task, name)]:
        raise UsageError(f"{name_task(opened)} has no {', '.join(missing)}; a task has {', '.join(NEEDED)}")
    return opened


def open_task_data(config: Config, given: Data | None = None) -> OwnBatches:
    """Returns the batches of the user's task, or those that are given instead; each is checked."""
    task, count = open_task(config), config.training.batch
    if given is None:
        name, held_out = name_task(task), task.validation(count)
        given = OwnBatches(lambda first_step: task.batches(first_step, count), validation=held_out, name=name)
    if not isinstance(given, OwnBatches):
        raise UsageError(f"a task reads arrays, and {given.name} has text; give OwnBatches, or Task.batches")
    return given.with_check(functools.partial(check_batch, shapes=find_batch_shapes(task, count)))


@functools.lru_cache
def _import_task(name: str) -> object:
    file, _, made_by = name.rpartition(":")
    if not file.endswith(".py") or not made_by.isidentifier():
        raise UsageError(f"{TAKES}; got task={name:.100}")
    make = import_function("task", name, TAKES)
    try:
        with forbid_exit(f"task={name}"):
            return make()
    except Exception as error:  # the user's code may raise anything
        raise UsageError(f"task={name} raises {type(error).__name__}: {error!s:.200}") from None
