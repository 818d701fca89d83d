"""A user's task on a mesh: its Haiku function traced for one shard, and the split of each parameter.

A parameter's split is read where the module makes it: along the dimension whose size is the global size divided by
the shards of `mp`. The global shape is that of a trace on axes of size 1, where the parameters are drawn, too.
"""

import collections
import functools
from collections.abc import Callable
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import DP, MP, PREFIX
from shardformer.errors import UsageError
from shardformer.kernels.threefry import THREEFRY
from shardformer.layout import Layout
from shardformer.model.task import ADDED, Task, check_batch, find_batch_shapes, name_task, open_task
from shardformer.model.task_on_mesh import Loss, Sums, TaskOnMesh, count_rows
from shardformer.parallel.layer_exchange import apply_to_full_matrices

ONE_SHARD = ((DP, 1), (MP, 1))
RESERVED = ("loss", "z_loss")  # the names of the metrics of a step that a task does not choose


class OwnTask(TaskOnMesh):
    """The user's task of one layout and mesh."""

    def __init__(self, layout: Layout, mesh: Mesh):
        config = layout.config
        self.task = open_task(config)
        self._function = make_function(self.task)
        shapes = self.abstract_parameters(config)
        local, metrics = _trace(self.task, config.training.batch, tuple(mesh.shape.items()))
        _check_metrics(metrics)
        self.unmeasured = ("z_loss",) if "accuracy" in metrics else ("z_loss", "accuracy")
        self.losses = collections.namedtuple(  # type: ignore[misc]
            "Losses", (*Loss._fields, *(name for name in sorted(metrics) if name != "accuracy"))
        )
        self.sums_type: Any = collections.namedtuple("OwnSums", (*Sums._fields, *self.details))  # type: ignore[misc]
        super().__init__(layout, mesh, shapes, _find_splits(shapes, local, mesh.shape[MP]))

    @staticmethod
    def abstract_parameters(config: Config) -> dict:
        """Returns the parameter tree with global shapes; touches no device."""
        shapes, _ = _trace(open_task(config), config.training.batch, ONE_SHARD)
        return jax.tree.map(lambda leaf: leaf, shapes)  # copied, as a caller may change its dictionaries

    @staticmethod
    def count_flops(config: Config) -> float:
        return open_task(config).flops()

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of a training batch, without their shardings."""
        return find_batch_shapes(self.task, self.config.training.batch)

    def make_batch(self) -> dict[str, np.ndarray]:
        """Returns the batch of the first step, for a verification or a measurement."""
        count = self.config.training.batch
        return check_batch(next(iter(self.task.batches(0, count))), find_batch_shapes(self.task, count))

    def draw_parameters(self, seed) -> dict:
        """Draws the parameters on axes of size 1, where a shard is the full model."""
        initialise = self._function.init
        for axis in (DP, MP):
            initialise = jax.vmap(initialise, in_axes=None, axis_size=1, axis_name=axis)
        batch = _add_examples(_make_zeros(find_batch_shapes(self.task, 1)))
        return jax.tree.map(lambda p: p[0, 0], initialise(jax.random.key(seed, impl=THREEFRY), batch))

    def map_matrices(self, function, tree):
        """Applies a function of full matrices to the matrices of a tree of some of the gradients or moments."""
        matrix_specs = self.find_grad_specs(tree)

        def apply(part, spec):
            return apply_to_full_matrices(function, part[None], P(None, *spec))[0]

        def body(tree):
            return jax.tree.map(apply, tree, matrix_specs)

        return self.shard_map(body, (matrix_specs,), matrix_specs)(tree)

    # Shard view.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, the task's losses) of this shard's rows."""
        key = None if dropout_key is None else jax.random.wrap_key_data(dropout_key, impl=THREEFRY)
        loss, metrics = self._function.apply(self.replicas.gather_outside(params), key, batch)
        self._check_loss(loss)
        values = {"loss": loss, "z_loss": jnp.zeros_like(loss), "accuracy": jnp.zeros_like(loss)} | {
            name: self._vary_like_loss(name, value, loss) for name, value in metrics.items()
        }
        return loss, lax.stop_gradient(self.losses(**values))

    def local_sums(self, params, batch) -> Sums:
        """Returns the sums of this shard's rows, each of which counts once."""
        _, losses = self.local_objective(params, self.number_rows(batch))
        rows = jnp.full_like(losses.loss, count_rows(batch))
        accuracy = jnp.nan if "accuracy" in self.unmeasured else losses.accuracy
        further = {name: rows * getattr(losses, name) for name in self.details}
        return self.sums_type(rows, rows * losses.loss, rows * accuracy, jnp.zeros_like(rows), **further)

    def _check_loss(self, loss) -> None:
        """Raises UsageError for a loss that is no scalar, or that the shards have not summed as they must."""
        if loss.shape or loss.dtype != jnp.float32:
            raise UsageError(
                f"the loss of {name_task(self.task)} is {loss.dtype}{list(loss.shape)}, expected a float32 scalar: the "
                "mean over this shard's rows"
            )
        if not self.check_types:
            return
        axes = collectives.varying_axes(loss)
        if MP in axes:
            raise UsageError(
                f"the loss of {name_task(self.task)} differs between the shards of mp: sum the parts of the model, by "
                'jax.lax.psum(x, "mp"), where each shard has only its part'
            )
        if DP not in axes and self.config.parallel.dp > 1:
            raise UsageError(
                f"the loss of {name_task(self.task)} is the same on all shards of dp; return the mean over this "
                "shard's rows, which the trainer averages over dp"
            )

    def _vary_like_loss(self, name: str, value, loss):
        value = jnp.asarray(value, jnp.float32)
        if self.check_types and MP in collectives.varying_axes(value):
            raise UsageError(
                f"the metric {name} of {name_task(self.task)} differs between the shards of mp; give one that is the "
                'same on all, as jax.lax.psum(x, "mp") is'
            )
        return collectives.vary_like(value, loss) if self.check_types else value


def make_function(task: Task) -> hk.Transformed:
    """Returns the Haiku function of a batch that gives (the loss, a dict of further metrics)."""
    return hk.transform(_make_call(task))


def _make_call(task: Task) -> Callable:
    def call(batch: dict) -> tuple:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):  # this package's code is strict
            result = task.loss(batch)
        return result if isinstance(result, tuple) else (result, {})

    return call


@functools.lru_cache(maxsize=32)
def _trace(task: Task, count: int, mesh_axes: tuple[tuple[str, int], ...]) -> tuple[dict, dict]:
    """Returns the shapes of one shard's parameters and the shapes of the metrics; touches no device."""
    names, sizes = zip(*mesh_axes, strict=True)
    mesh = AbstractMesh(sizes, names, axis_types=(AxisType.Auto,) * len(sizes))
    function, key = make_function(task), jax.random.key(0, impl=THREEFRY)
    metrics: dict = {}

    def trace(batch):
        params, state = hk.transform_with_state(_make_call(task)).init(key, _add_examples(batch))
        if state:
            raise UsageError(
                f"{name_task(task)} keeps Haiku state in {', '.join(state)}, and a task has no state: use hk.LayerNorm "
                "or hk.GroupNorm in place of hk.BatchNorm"
            )
        metrics.update(function.apply(params, key, _add_examples(batch))[1])
        _check_without_key(task, function, params, _add_examples(batch))
        return jax.tree.map(lambda p: p[None], params)

    shapes = find_batch_shapes(task, count)
    # Types are checked in the step: here, `verify exact=true` must learn the shapes of a program that they reject.
    mapped = jax.shard_map(trace, mesh=mesh, in_specs=P(DP), out_specs=P((DP, MP)), check_vma=False)
    stacked = jax.eval_shape(mapped, shapes)
    local = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape[1:], leaf.dtype), stacked)
    _check_parameters(task, local)
    return local, {name: np.shape(value) for name, value in metrics.items()}


def _check_without_key(task: Task, function: hk.Transformed, params: dict, batch: dict) -> None:
    """Raises UsageError if a loss that can be computed with a key cannot without one, as an evaluation computes it."""
    try:
        function.apply(params, None, batch)
    except Exception as error:  # of Haiku, or of the user's code
        raise UsageError(
            f"the loss of {name_task(task)} draws random numbers where it has no key, in an evaluation: use "
            "hk.maybe_next_rng_key(), and draw none where that is None"
        ) from error


def _check_parameters(task: Task, shapes: dict) -> None:
    if not shapes:
        raise UsageError(f"{name_task(task)} makes no parameters; its loss must, by hk.get_parameter or a Haiku module")
    for module, leaves in shapes.items():
        for name, leaf in leaves.items():
            if leaf.dtype != jnp.float32:
                raise UsageError(
                    f"the parameter {module}/{name} is {leaf.dtype}; a run trains float32 parameters: cast it where it "
                    "is used"
                )
        if module.startswith(PREFIX):
            raise UsageError(f"the module {module} has a name of the language model's; name it otherwise")


def _find_splits(shapes: dict, local: dict, shards: int) -> dict:
    """Returns the spec of each parameter, from its global shape and that of one shard."""
    if {module: leaves.keys() for module, leaves in shapes.items()} != {
        m: leaves.keys() for m, leaves in local.items()
    }:
        raise UsageError(f"one shard of mp={shards} has other parameters than the full model; make the same on both")
    return {
        module: {name: _find_split(f"{module}/{name}", leaf.shape, local[module][name].shape, shards)
                 for name, leaf in leaves.items()}
        for module, leaves in shapes.items()
    }  # fmt: skip


def _find_split(name: str, full: tuple[int, ...], local: tuple[int, ...], shards: int) -> P:
    split = [i for i, sizes in enumerate(zip(full, local, strict=False)) if sizes[0] != sizes[1]]
    fits = len(full) == len(local) and len(split) < 2 and all(full[i] == local[i] * shards for i in split)
    if not fits:
        raise UsageError(
            f"the parameter {name} has the shape {full} on one shard, and {local} on one of mp={shards}; one dimension "
            f"may be split into {shards} equal parts"
        )
    return P(*(MP if i in split else None for i in range(len(full))))


def _check_metrics(metrics: dict[str, tuple]) -> None:
    for name, shape in metrics.items():
        if name in RESERVED:
            raise UsageError(f"a metric is named {name}, which is a column of every run; give it another name")
        if not (isinstance(name, str) and name.isidentifier()) or shape:
            raise UsageError(f"the metric {name!r:.40} has the shape {shape}; give scalars, named by identifiers")


def _add_examples(batch: dict) -> dict[str, Any]:
    return batch | {ADDED: jnp.arange(count_rows(batch))}


def _make_zeros(shapes: dict) -> dict:
    return {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in shapes.items()}
