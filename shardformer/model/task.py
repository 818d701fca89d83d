"""The base class of a user's task: the module and the loss that a run trains, as one shard sees them."""

import functools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from shardformer.config import Config
from shardformer.errors import UsageError, forbid_exit
from shardformer.user_code import import_function

TAKES = "task takes FILE.py:NAME, a subclass of shardformer.Task or a function that returns one"
NEEDED = ("rows", "batches", "loss")
ADDED = "examples"  # the array of a batch that the trainer adds
Batch = dict[str, np.ndarray]  # arrays that lead with the rows


class Task:
    """A loss with its data. A subclass has `rows`, `batches` and `loss`; the tutorial of the documentation shows one.

    >>> import itertools, haiku as hk, numpy as np
    >>> from shardformer import Task
    >>> class Mean(Task):
    ...     def rows(self):
    ...         return {"x": np.zeros(3, np.float32)}
    ...     def batches(self, first_step, count):
    ...         for step in itertools.count(first_step):
    ...             yield {"x": np.random.default_rng(step).normal(size=(count, 3)).astype(np.float32)}
    ...     def loss(self, batch):
    ...         mean = hk.get_parameter("mean", [3], init=hk.initializers.Constant(1))
    ...         return ((batch["x"] - mean) ** 2).mean()
    >>> next(Mean().batches(5, count=8))["x"].shape
    (8, 3)

    `Session.create(config, task=Mean())` trains it, and so does `train task=FILE.py:Mean`.
    """

    def rows(self) -> Mapping[str, Any]:
        """Returns one row of each array of a batch, by name: an array or a jax.ShapeDtypeStruct.

        Only its shape and its dtype count.
        """
        raise NotImplementedError

    def batches(self, first_step: int, count: int) -> Iterator[Batch]:
        """Yields the global batch of each step from `first_step` on, NumPy arrays of `count` rows.

        A batch should depend on its step only, so that a resumed run reads what an unstopped one does.
        """
        raise NotImplementedError

    def validation(self, count: int) -> Sequence[Batch]:
        """Returns the batches of each evaluation, `count` rows each; none by default."""
        return ()

    def loss(self, batch: dict) -> Any:
        """Returns the mean loss of this shard's rows, or (the loss, a dict of further means).

        A Haiku function, which makes its parameters by `hk.get_parameter` or Haiku's modules. A parameter is split
        over `mp` along the dimension of which the loss asks for 1 / `jax.lax.axis_size("mp")`; it is drawn where that
        is 1.
        Collectives over `mp` are written out; `dp` is averaged over by the trainer. A further mean "accuracy" stands
        in the column of that name. `batch["examples"]` has the index of each row in the global batch. With
        `hk.maybe_next_rng_key()`, a step has a key, the same on all shards, and an evaluation None.
        """
        raise NotImplementedError

    def flops(self) -> float:
        """Returns the FLOPs of a row in a training step, for the metric mfu; 0: unknown."""
        return 0.0

    def report(self, params: dict) -> Iterable[str]:
        """Returns lines to print at the end of a run, such as samples; `params` are the best, as NumPy arrays."""
        return ()


def name_task(task: Task) -> str:
    """Returns the name of a task: that of its class."""
    return type(task).__name__


def find_batch_shapes(task: Task, count: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the shapes of a batch of `count` rows."""
    rows = task.rows()
    if ADDED in rows or not rows:
        raise UsageError(f"rows of {name_task(task)} has {', '.join(rows) or 'no arrays'}; give others ({ADDED} is "
                         "the trainer's)")  # fmt: skip
    return {name: jax.ShapeDtypeStruct((count, *np.shape(row)), row.dtype) for name, row in rows.items()}


def check_batch(batch: Batch, shapes: dict[str, jax.ShapeDtypeStruct]) -> Batch:
    """Returns the arrays of a task's batch in their dtypes; raises UsageError for others."""
    arrays = {name: np.asarray(values) for name, values in batch.items()}
    for name in sorted({*arrays, *shapes}):
        got = f"{arrays[name].dtype}{list(arrays[name].shape)}" if name in arrays else "nothing"
        wanted = f"{shapes[name].dtype}{list(shapes[name].shape)}" if name in shapes else "no such array"
        if got != wanted:
            raise UsageError(f"{name} is {got}, expected {wanted}, as rows() of the task has it")
    return arrays


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
