"""A task in the global view: its parameters on a mesh, and the loss and gradients of training.

Inside a `shard_map`, an array is one shard's slice and collectives are written out. Outside, an array is global and
carries a `NamedSharding`, and XLA inserts the collectives. A run, its checkpoints, its evaluations and its optimizer
know only this class. The language model, each of its objectives and a user's `Task` are subclasses.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.config import Config
from shardformer.devices import programs
from shardformer.layout import Layout, specs
from shardformer.layout.mesh import resolve_on
from shardformer.objectives.objective import import_class
from shardformer.parallel.microbatch import AccumulationType, microbatch

ROWS = P("dp")  # batch rows: split over dp, replicated over mp; see also TaskOnMesh.row_spec


class Loss(NamedTuple):
    """Means over the tokens of a batch."""

    loss: jax.Array  # cross-entropy in nats per token
    z_loss: jax.Array  # the squared log-partition, before its coefficient
    accuracy: jax.Array


class AllParameters:
    """The trainable parameters of a model without adapters: all."""

    def select(self, params):
        """Returns the trainable parameters (or their specs, shapes or gradients)."""
        return params

    def replace(self, params, new):
        """Returns all parameters, with new values for the trainable ones."""
        return new

    def add(self, params, key):
        """Returns the parameters with those that only this model has, drawn from a key."""
        return params


class Sums(NamedTuple):
    """Weighted sums over the tokens of a batch, for an evaluation of two or more batches."""

    tokens: jax.Array
    nats: jax.Array
    correct: jax.Array
    bytes: jax.Array  # of the text that the targets stand for; 0 if the batch has no "bytes"


class TaskOnMesh:
    """A task of one layout and mesh, as pure functions of global arrays, to be jitted by the caller.

    Subclasses have the shard view: `batch_shapes`, `local_objective` and `local_sums`.
    """

    def __init__(self, layout: Layout, mesh: Mesh, shapes: dict, split: dict, trainable: Any = None):
        """Takes the parameters' global shapes, and the specs that split each over mp and pp."""
        config = layout.config
        self.config, self.mesh, self.trainable = config, mesh, trainable or AllParameters()
        if isinstance(mesh, Mesh):
            programs.reject_unsafe_cache(config, mesh.devices.flat[0].platform)
        self.row_spec = ROWS if config.parallel.pp == 1 else P(("dp", "pp"))  # each stage embeds different rows
        self.shapes = shapes
        self.zero_dimensions = specs.zero_dimensions(shapes, split, config)
        self.specs = specs.split_over_dp(split, self.zero_dimensions, config)
        self.grad_specs = self.trainable.select(self.specs)
        self.shardings = jax.tree.map(self.sharding, self.specs)
        self.replicas = layout.replicas.with_dimensions(self.zero_dimensions)
        self.layout = dataclasses.replace(layout, replicas=self.replicas)
        self.token_axes = config.parallel.token_axes
        # With pp > 1, the pipeline runs the microbatches.
        in_sequence = config.training.accum > 1 and config.parallel.pp == 1
        self.run_rows = functools.partial(run_in_sequence, count=config.training.accum) if in_sequence else run_at_once
        self.count_first: Callable = count_nothing
        self._init = programs.jit(self.draw_parameters, out_shardings=self.shardings)

    @classmethod
    def on(cls, config: Config, mesh: Mesh):
        """Returns the task in the layout that this mesh's devices choose."""
        return cls(resolve_on(config, mesh), mesh)  # type: ignore[call-arg]  # subclasses find shapes and splits

    @staticmethod
    def abstract_parameters(config: Config) -> dict:
        """Returns the parameter tree with global shapes; touches no device."""
        raise NotImplementedError

    @staticmethod
    def describe_sizes(config: Config) -> str:
        """Formats the sizes that a start prints behind the number of parameters."""
        return ""

    @staticmethod
    def count_flops(config: Config) -> float | None:
        """Returns the FLOPs of a token or a row in a step; None: those of a language model, by its parameters."""
        return None

    @property
    def abstract(self):
        """The float32 parameters' shapes and shardings, without arrays."""
        return with_shardings(self.shapes, self.shardings)

    @property
    def not_scattered(self) -> list[str]:
        """The parameters that ZeRO leaves replicated over dp, because none of their dimensions divides."""
        if not self.config.parallel.zero or self.config.parallel.replicas == 1:
            return []
        by_module = self.zero_dimensions.items()
        return [f"{module}/{name}" for module, leaves in by_module for name, d in leaves.items()
                if d is None and not _is_split_over_dp(self.specs[module][name])]  # fmt: skip

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @property
    def read_abstract(self):
        """The shapes and shardings of the parameters that a checkpoint has."""
        return self.abstract

    def name_parts(self, params: dict) -> dict:
        """Returns the stored form of parameters that were read."""
        return params

    def store(self, params: dict) -> dict:
        """Returns the stored form of float parameters."""
        return params

    def make_base_model(self, base: Config) -> "TaskOnMesh":
        """Returns the task that has the parameters of a base."""
        return self

    def check_attention(self) -> None:
        """Raises UsageError if the mesh's devices lack a kernel."""

    check_types = True  # of shard_map; without them, `verify exact=true` runs a program that they reject
    losses: Any = Loss  # of a step: `Loss`, or a NamedTuple that starts with its fields
    unmeasured: tuple[str, ...] = ()  # the fields of `Loss` that this task does not have
    batch_is_stored = False  # a step learns from the batch in its state, so that a resume has the same one

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of a training batch, without their shardings."""
        raise NotImplementedError

    def make_batch(self) -> dict[str, np.ndarray]:
        """Returns a batch for a measurement of a step: every weight is 1."""
        return {
            name: np.ones(leaf.shape, leaf.dtype) if leaf.dtype == np.float32 else np.zeros(leaf.shape, leaf.dtype)
            for name, leaf in self.batch_shapes().items()
        }

    def draw_parameters(self, seed) -> dict:
        """Returns the parameters of a seed, as a run stores them."""
        raise NotImplementedError

    @property
    def details(self) -> tuple[str, ...]:
        """The names of further metrics of a step, in their order."""
        return self.losses._fields[len(Loss._fields) :]

    def constant_shapes(self) -> dict:
        """Returns the shapes and shardings of the arrays that a step needs besides its batch."""
        return {}

    def companion_shapes(self) -> dict:
        """Returns the shapes and shardings of another model's arrays, which a step does not read."""
        return {}

    def make_constants(self) -> dict:
        """Returns arrays of these shapes, for a measurement of a step."""
        return {}

    def init(self, seed: int):
        """Returns the float32 parameters of a seed, bitwise the same on every mesh.

        No device stores more than its slice.
        """
        return self._init(np.int32(seed))

    def loss_and_grad(self, params, batch, dropout_key):
        """Returns the batch's `Loss` and the gradient of its objective, which ZeRO splits over dp.

        Runs the `accum` microbatches in sequence, or through the pipeline if pp > 1. parallel/README.md follows the
        gradient of a matrix from here to its owner.
        """

        def body(params, batch, dropout_key):
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            counts = self.count_first(self, params, rows, dropout_key)

            def grad(batch):
                return self._unscaled_loss_and_grad(params, batch, dropout_key, counts)

            return self._mean(*self.run_rows(grad, rows))

        in_specs = self.specs, self.row_spec, P()
        return self.shard_map(body, in_specs, (P(), self.grad_specs))(params, self.prepare(batch), dropout_key)

    def loss_and_grad_of_part(self, params, batch, dropout_key, part):
        """Returns the `Loss` and the gradient of microbatch number `part` of the `accum` microbatches."""

        def body(params, batch, dropout_key, part):
            size = count_rows(batch) // self.config.training.accum
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            counts = self.count_first(self, params, rows, dropout_key)
            rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * size, size), rows)
            return self._mean(*self._unscaled_loss_and_grad(params, rows, dropout_key, counts))

        in_specs, batch = (self.specs, self.row_spec, P(), P()), self.prepare(batch)
        return self.shard_map(body, in_specs, (P(), self.grad_specs))(params, batch, dropout_key, part)

    def evaluate(self, params, batch, dropout_key=None):
        """Returns (the minimised loss, `Loss`) of the batch. Without a dropout key, nothing is dropped."""

        def body(params, batch, dropout_key):
            params = self.replicas.make_local(params)
            result = self.local_objective(params, self.number_rows(batch), dropout_key)
            return collectives.pmean(result, self.token_axes)

        in_specs = self.specs, self.row_spec, P()
        return self.shard_map(body, in_specs, P())(params, self.prepare(batch), dropout_key)

    def sums(self, params, batch) -> Sums:
        """Returns the weighted sums of a batch, of `accum` microbatches in sequence, as a step runs them."""

        def body(params, batch):
            params = self.replicas.make_local(params)
            sums = self.run_rows(functools.partial(self.local_sums, params), batch, accumulator=AccumulationType.SUM)
            return collectives.psum(sums, self.token_axes)

        return self.shard_map(body, (self.specs, self.row_spec), P())(params, batch)

    def prepare(self, batch):
        """Returns the batch with what needs all of its rows."""
        return batch

    def objective(self, trainable, params, batch, dropout_key):
        """Returns the minimised loss as a function of the trainable parameters, for a line search."""
        return self.evaluate(self.trainable.replace(params, trainable), batch, dropout_key)[0]

    def norm(self, grads) -> jax.Array:
        """Returns the global norm of a tree like the gradient."""
        return jnp.sqrt(self.sum_squares(grads))

    def sum_squares(self, tree) -> jax.Array:
        """Returns the global sum of squares of a tree of some of the gradients."""
        tree_specs = self.find_grad_specs(tree)

        def body(tree):
            return collectives.sum_squares(jax.tree.leaves(tree), jax.tree.leaves(tree_specs))

        return self.shard_map(body, (tree_specs,), P())(tree)

    def map_matrices(self, function, tree):
        """Applies a function of full matrices [layers, D, F] to a tree of some of the layers' gradients or moments."""
        from shardformer.parallel.layer_exchange import apply_to_full_matrices  # not imported without such a function

        matrix_specs = self.find_grad_specs(tree)

        def body(tree):
            return jax.tree.map(functools.partial(apply_to_full_matrices, function), tree, matrix_specs)

        return self.shard_map(body, (matrix_specs,), matrix_specs)(tree)

    def find_grad_specs(self, tree):
        """Returns the specs of a tree of some of the gradients."""
        return tree_util.tree_map_with_path(lambda path, _: self.grad_specs[path[0].key][path[1].key], tree)

    def shard_map(self, body: Callable, in_specs, out_specs) -> Callable:
        """Returns a function of shards as a function of global arrays; the specs may name axes of one device."""
        in_specs, out_specs = collectives.drop_unit_axes((in_specs, out_specs), self.mesh)
        checked = self.check_types
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=checked)

    # Shard view: the parts of the bodies above.

    def number_rows(self, batch):
        """Returns the batch with `examples`: the index in the global batch of each of this shard's rows."""
        rows = count_rows(batch)
        return batch | {"examples": collectives.index(self.row_spec[0]) * rows + jnp.arange(rows)}

    def local_objective(self, params, batch, dropout_key=None, counts=None) -> tuple:
        """Returns (the minimised loss, `losses`) of this shard's rows; `counts` is the result of `count_first`."""
        raise NotImplementedError

    def local_sums(self, params, batch) -> Sums:
        """Returns the sums of this shard's rows in an evaluation."""
        raise NotImplementedError

    def _unscaled_loss_and_grad(self, params, batch, dropout_key, counts=None):
        """Returns `Loss` and the gradient of this shard's rows, in float32 for the sums that follow.

        With ZeRO-3, the backward pass has already summed the gradients of split parameters over the replicas.
        """

        def objective(trainable):
            return self.local_objective(self.trainable.replace(params, trainable), batch, dropout_key, counts)

        (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(self.trainable.select(params))
        return losses, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def _mean(self, losses, grads):
        """Averages over all rows of the batch."""
        means = collectives.pmean(jnp.stack(losses), self.token_axes)  # one collective
        return type(losses)(*means), self.replicas.mean(grads)


def _is_split_over_dp(spec: P) -> bool:
    return any(isinstance(axes, tuple) and "dp" in axes for axes in spec)


def count_nothing(model, params, rows, dropout_key) -> None:
    """Returns None: without a balance loss over microbatches, the objective needs no counts of the full batch."""


def run_in_sequence(function: Callable, batch: dict, accumulator=AccumulationType.MEAN, *, count: int):
    """Returns the accumulated results of `count` microbatches of a batch, which run in sequence."""
    traced_once = jax.jit(function, inline=True)  # optax asks for its shapes, then calls it in a loop
    return microbatch(traced_once, 0, count_rows(batch) // count, accumulator)(batch)


def count_rows(batch: dict) -> int:
    """Returns the number of a batch's rows, by which each of its arrays leads."""
    return jax.tree.leaves(batch)[0].shape[0]


def run_at_once(function: Callable, batch: dict, accumulator=None):
    """Returns the result for a batch that is one microbatch."""
    return function(batch)


def with_shardings(shapes, shardings):
    """Returns the tree of ShapeDtypeStructs with these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def choose_task(config: Config) -> type[TaskOnMesh]:
    """Returns the class of the task that a configuration trains."""
    return import_class(config.objective.task)
