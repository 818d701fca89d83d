"""The model in the global view: its parameters on a mesh, and the loss and gradients of training.

Inside a `shard_map`, an array is one shard's slice and collectives are written out. Outside, an array is global and
carries a `NamedSharding`, and XLA inserts the collectives. `Decoder` and `Measures` have the model's other functions.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.devices import programs
from shardformer.errors import UsageError
from shardformer.kernels.threefry import THREEFRY
from shardformer.layout import Layout, resolve, specs
from shardformer.layout.attention_limits import NoKernel
from shardformer.layout.float_weights import FloatWeights
from shardformer.layout.mesh import resolve_on
from shardformer.model.lora import TrainableAdapters
from shardformer.parallel.layer_exchange import apply_to_full_matrices
from shardformer.parallel.microbatch import AccumulationType, run_in_sequence
from shardformer.parallel.replicas import map_named
from shardformer.shards import CausalTransformerShard, Dropout

ROWS = P("dp")  # batch rows: split over dp, replicated over mp; see also Model.row_spec


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


def choose_trainable(config: Config) -> AllParameters | TrainableAdapters:
    """Returns the trainable parameters' functions: only the adapters if there are any, else all parameters."""
    return TrainableAdapters(config) if config.lora.lora_rank else AllParameters()


class Model:
    """The model of one layout and mesh, as pure functions of global arrays, to be jitted by the caller."""

    def __init__(self, layout: Layout, mesh: Mesh):
        config = layout.config
        self.config, self.mesh, self.trainable = config, mesh, choose_trainable(config)
        if isinstance(mesh, Mesh):
            programs.reject_unsafe_cache(config, mesh.devices.flat[0].platform)
        self.row_spec = ROWS if config.parallel.pp == 1 else P(("dp", "pp"))  # each stage embeds different rows
        self._weights = layout.weights
        self.shapes = self._weights.store(self.abstract_parameters(config))
        self.zero_dimensions = specs.zero_dimensions(self.shapes, config)
        self.specs = specs.split_over_dp(specs.parameter_specs(self.shapes, config), self.zero_dimensions, config)
        self.grad_specs = self.trainable.select(self.specs)
        self.shardings = jax.tree.map(self.sharding, self.specs)
        self.replicas = layout.replicas.with_dimensions(self.zero_dimensions)
        self.layout = dataclasses.replace(layout, replicas=self.replicas)
        self.shard = CausalTransformerShard(self.layout)
        self.token_axes = config.parallel.token_axes
        self.has_dropout = bool(config.training.dropout or config.lora.lora_dropout)
        # With pp > 1, the pipeline runs the microbatches.
        in_sequence = config.training.accum > 1 and config.parallel.pp == 1
        self.run_rows = functools.partial(run_in_sequence, count=config.training.accum) if in_sequence else run_at_once
        self.count_first = choose_counts(config)
        initialise = functools.partial(_initialise_stored, config.architecture, self._weights)
        self._init = programs.jit(initialise, out_shardings=self.shardings)

    @classmethod
    def on(cls, config: Config, mesh: Mesh) -> "Model":
        """Returns the model in the layout that this mesh's devices choose."""
        return cls(resolve_on(config, mesh), mesh)

    @property
    def abstract(self):
        """The float32 parameters' shapes and shardings, without arrays."""
        return with_shardings(self.shapes, self.shardings)

    @property
    def read_abstract(self):
        """The shapes and shardings of the float32 parameters that a checkpoint has; `store` quantises them."""
        if not self.config.stored.quantized:
            return self.abstract
        return type(self).on(self.config.replace(weights="float"), self.mesh).abstract

    def init_trainable(self, seed: int):
        """Returns the trainable parameters of a seed as `init` draws them, without the memory of the others."""

        def initialise(seed):
            return self.trainable.select(_initialise_stored(self.config.architecture, self._weights, seed))

        return programs.jit(initialise, out_shardings=self.trainable.select(self.shardings))(np.int32(seed))

    def store_leaf(self, name: str, leaf):
        """Returns a parameter that was read, or the tuple of its codes and scales, on the same devices."""
        if not self._weights.is_quantized(name):
            return leaf
        quantize = functools.partial(self._weights.quantize, name)
        return jax.block_until_ready(programs.jit(quantize, out_shardings=self.find_part_shardings(name))(leaf))

    def find_part_shardings(self, name: str) -> tuple[NamedSharding, ...]:
        """Returns the shardings of the codes and scales of a parameter of this full name."""
        module, _, matrix = name.rpartition("/")
        return tuple(self.shardings[module][f"{matrix}{suffix}"] for suffix in self._weights.suffixes(name))

    def store(self, params: dict) -> dict:
        """Returns the stored form of float parameters on this mesh, made of one parameter after the other."""
        return self._weights.name_parts(map_named(self.store_leaf, params))

    def name_parts(self, params: dict) -> dict:
        """Returns the stored form of parameters that have passed through `store_leaf`."""
        return self._weights.name_parts(params)

    @property
    def not_scattered(self) -> list[str]:
        """The parameters that ZeRO leaves replicated over dp, because none of their dimensions divides."""
        if not self.config.parallel.zero or self.config.parallel.replicas == 1:
            return []
        by_module = self.zero_dimensions.items()
        return [f"{module}/{name}" for module, leaves in by_module for name, d in leaves.items()
                if d is None and not _is_split_over_dp(self.specs[module][name])]  # fmt: skip

    def check_attention(self) -> None:
        """Raises UsageError for attention=fused if the mesh's devices have no kernel for it."""
        attention = self.layout.attention
        if isinstance(self.mesh, Mesh) and isinstance(attention, NoKernel):
            raise UsageError(attention.message)

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    check_types = True  # of shard_map; without them, `verify exact=true` runs a program that they reject
    details: tuple[str, ...] = ()  # names of further metrics of a step, in their order

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of a training batch, without their shardings."""
        tokens = jax.ShapeDtypeStruct((self.config.training.batch, self.config.model.seq), jnp.int32)
        return {"tokens": tokens, "targets": tokens}

    def constant_shapes(self) -> dict:
        """Returns the shapes and shardings of the arrays that a step needs besides its batch."""
        return {}

    @staticmethod
    def abstract_parameters(config: Config):
        """Returns the parameter tree with global shapes; touches no device."""
        # The cached tree is copied: a caller may change its dictionaries.
        return jax.tree.map(lambda leaf: leaf, _parameter_shapes(config.architecture))

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
        return self.shard_map(body, in_specs, (P(), self.grad_specs))(params, normalise_weights(batch), dropout_key)

    def loss_and_grad_of_part(self, params, batch, dropout_key, part):
        """Returns the `Loss` and the gradient of microbatch number `part` of the `accum` microbatches."""

        def body(params, batch, dropout_key, part):
            size = batch["tokens"].shape[0] // self.config.training.accum
            params, rows = self.replicas.make_local(params), self.number_rows(batch)
            counts = self.count_first(self, params, rows, dropout_key)
            rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * size, size), rows)
            return self._mean(*self._unscaled_loss_and_grad(params, rows, dropout_key, counts))

        in_specs, batch = (self.specs, self.row_spec, P(), P()), normalise_weights(batch)
        return self.shard_map(body, in_specs, (P(), self.grad_specs))(params, batch, dropout_key, part)

    def evaluate(self, params, batch, dropout_key=None):
        """Returns (the minimised loss, `Loss`) of the batch. Without a dropout key, nothing is dropped."""

        def body(params, batch, dropout_key):
            params = self.replicas.make_local(params)
            result = self.local_objective(params, self.number_rows(batch), dropout_key)
            return collectives.pmean(result, self.token_axes)

        in_specs = self.specs, self.row_spec, P()
        return self.shard_map(body, in_specs, P())(params, normalise_weights(batch), dropout_key)

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
        rows = batch["tokens"].shape[0]
        return batch | {"examples": collectives.index(self.row_spec[0]) * rows + jnp.arange(rows)}

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `Loss`) of this shard's rows; `counts` is the result of `count_first`."""
        tokens = batch["tokens"].shape[1]
        batch = self.layout.attention.take_batch(batch)
        dropout = self._draw_masks(dropout_key, batch, tokens) if self.has_dropout and dropout_key is not None else None
        weights = batch.get("weights")
        objective, token = self.shard.loss(
            params, batch["tokens"], batch["targets"], dropout, batch.get("documents"), weights, counts
        )
        by_token = Loss(token.nats_BT, jnp.square(token.log_z_BT), token.correct_BT.astype(jnp.float32))
        losses = jax.tree.map(lambda x_BT: average_tokens(x_BT if weights is None else x_BT * weights), by_token)
        return objective, lax.stop_gradient(losses)

    def add_z_loss(self, objective, z_loss):
        """Adds the mean squared log-partition with the coefficient of training."""
        weight = self.config.training.z_loss
        return objective + weight * z_loss if weight else objective

    def local_records(self, params, batch, dropout_key=None):
        """Returns the records of the layers for this shard's rows."""
        tokens = batch["tokens"].shape[1]
        batch = self.layout.attention.take_batch(batch)
        dropout = self._draw_masks(dropout_key, batch, tokens) if self.has_dropout and dropout_key is not None else None
        return self.shard.record(params, batch["tokens"], dropout, batch.get("documents"))

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

    def _draw_masks(self, dropout_key, batch, tokens: int) -> Dropout:
        """Returns the dropout of this shard's rows, which have `tokens` tokens over all shards of cp."""
        c, key = self.config, jax.random.wrap_key_data(dropout_key, impl=THREEFRY)
        position_T = self.layout.attention.positions(tokens // c.parallel.cp) if c.parallel.cp > 1 else None
        return Dropout(c.training.dropout, key, batch["examples"], c.parallel.sequence_parallel, position_T)


def _is_split_over_dp(spec: P) -> bool:
    return any(isinstance(axes, tuple) and "dp" in axes for axes in spec)


def choose_counts(config: Config) -> Callable:
    """Returns the function that counts the tokens of each expert in a batch, before the gradients of its parts."""
    # The stages of a pipeline run all microbatches before the loss.
    if not config.experts.balance_loss or config.training.accum == 1 or config.parallel.pp > 1:
        return count_nothing
    return count_routes


def count_routes(model, params, batch, dropout_key) -> jax.Array:
    """Returns count_LE, the pairs of a token and an expert of the global batch, by a forward pass. Shard view."""

    def count(rows):
        return model.shard.records.count(model.local_records(params, rows, dropout_key))

    return model.run_rows(count, batch, accumulator=AccumulationType.SUM)


def count_nothing(model, params, rows, dropout_key) -> None:
    """Returns None: without a balance loss over microbatches, the objective needs no counts of the full batch."""


def run_at_once(function: Callable, batch: dict, accumulator=None):
    """Returns the result for a batch that is one microbatch."""
    return function(batch)


def average_tokens(x_BT):
    """Returns the mean of the tokens of this shard's rows.

    Each row is summed first. A CPU's sum of all tokens at once was off by 3e-7 for 64 tokens, and differed by mesh.
    """
    return x_BT.mean(-1).mean()


def normalise_weights(batch):
    """Scales the weights of tokens to mean 1 over the global batch, so that plain means of products are weighted means.

    Global view.
    """
    if "weights" not in batch:
        return batch
    return batch | {"weights": batch["weights"] / jnp.maximum(batch["weights"].mean(), jnp.finfo(jnp.float32).tiny)}


def with_shardings(shapes, shardings):
    """Returns the tree of ShapeDtypeStructs with these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def _initialise_stored(architecture: Config, weights: FloatWeights, seed):
    """Draws the parameters in the form in which they are stored."""
    return weights.store(_initialise(architecture, seed))


@functools.lru_cache
def _parameter_shapes(architecture: Config):
    return jax.eval_shape(functools.partial(_initialise, architecture), np.int32(0))


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once for the shapes and the program
def _initialise(architecture: Config, seed):
    """Draws the parameters by the shard modules on size-1 axes, where a shard is the full model."""
    plain = architecture.replace(lora_rank=0)  # the other parameters do not depend on adapters
    initialise = CausalTransformerShard(resolve(plain)).init
    for axis in ("dp", "mp"):
        initialise = jax.vmap(initialise, in_axes=None, axis_size=1, axis_name=axis)
    key = jax.random.key(seed, impl=THREEFRY)
    params = jax.tree.map(lambda p: p[0, 0], initialise(key))
    return choose_trainable(architecture).add(params, jax.random.fold_in(key, Stream.LORA))
