"""The language model as a task: its parameters, and the loss of the tokens of this shard's rows.

`Decoder` and `Measures` have the model's other functions.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding

from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.devices import programs
from shardformer.errors import UsageError
from shardformer.kernels.threefry import THREEFRY
from shardformer.layout import Layout, resolve, specs
from shardformer.layout.attention_limits import NoKernel
from shardformer.model.task_on_mesh import AllParameters, Loss, Sums, TaskOnMesh, choose_task, count_nothing
from shardformer.parallel.microbatch import AccumulationType
from shardformer.parallel.replicas import map_named
from shardformer.shards import CausalTransformerShard, Dropout
from shardformer.tables import format_count


def choose_trainable(config: Config) -> Any:
    """Returns the trainable parameters' functions: only the adapters if there are any, else all parameters."""
    if not config.lora.lora_rank:
        return AllParameters()
    from shardformer.adapters.lora import TrainableAdapters  # not imported without adapters

    return TrainableAdapters(config)


class Model(TaskOnMesh):
    """The language model of one layout and mesh, trained by the loss of every token."""

    shard_class = CausalTransformerShard

    def __init__(self, layout: Layout, mesh: Mesh):
        config = layout.config
        if not (config.objective.has_vocabulary or isinstance(self, choose_task(config))):
            trained = config.objective.trained
            raise UsageError(f"this run trained {trained}: it has no language model, which is needed here")
        self._weights = layout.weights
        shapes = self._weights.store(self.abstract_parameters(config))
        super().__init__(layout, mesh, shapes, specs.parameter_specs(shapes, config), choose_trainable(config))
        self.shard = self.shard_class(self.layout)
        self.count_first = choose_counts(config)

    @property
    def read_abstract(self):
        """The shapes and shardings of the float32 parameters that a checkpoint has; `store` quantises them."""
        if not self.config.stored.quantized:
            return self.abstract
        return type(self).on(self.config.replace(weights="float"), self.mesh).abstract

    def init_trainable(self, seed: int):
        """Returns the trainable parameters of a seed as `init` draws them, without the memory of the others."""

        def initialise(seed):
            return self.trainable.select(self.draw_parameters(seed))

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

    def check_attention(self) -> None:
        """Raises UsageError for attention=fused if the mesh's devices have no kernel for it."""
        attention = self.layout.attention
        if isinstance(self.mesh, Mesh) and isinstance(attention, NoKernel):
            raise UsageError(attention.message)

    def batch_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the arrays of a training batch, without their shardings."""
        tokens = jax.ShapeDtypeStruct((self.config.training.batch, self.config.model.seq), jnp.int32)
        return {"tokens": tokens, "targets": tokens}

    def make_batch(self) -> dict[str, np.ndarray]:
        from shardformer.model.random_tokens import draw_tokens  # not imported by a run

        return draw_tokens(self.config)

    @staticmethod
    def abstract_parameters(config: Config):
        """Returns the parameter tree with global shapes; touches no device."""
        # The cached tree is copied: a caller may change its dictionaries.
        return jax.tree.map(lambda leaf: leaf, _parameter_shapes(config.architecture))

    @staticmethod
    def describe_sizes(config: Config) -> str:
        c = config.model
        return f", {format_count(c.layers, 'layer')}, d_model {c.d_model}, {format_count(c.heads, 'head')}"

    def draw_parameters(self, seed):
        """Draws the parameters in the form in which they are stored."""
        return self._weights.store(_initialise(self.config.architecture, seed))

    def prepare(self, batch):
        return normalise_weights(batch)

    # Shard view.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `Loss`) of this shard's rows; `counts` is the result of `count_first`."""
        tokens = batch["tokens"].shape[1]
        batch = self.layout.attention.take_batch(batch)
        dropout = self.draw_masks(dropout_key, batch, tokens)
        weights = batch.get("weights")
        objective, token = self.shard.loss(
            params, batch["tokens"], batch["targets"], dropout, batch.get("documents"), weights, counts
        )
        by_token = Loss(token.nats_BT, jnp.square(token.log_z_BT), token.correct_BT.astype(jnp.float32))
        losses = jax.tree.map(lambda x_BT: average_tokens(x_BT if weights is None else x_BT * weights), by_token)
        return objective, lax.stop_gradient(losses)

    def local_sums(self, params, batch) -> Sums:
        """Returns the sums of this shard's rows, in which each target has a weight (0 for padding)."""
        batch = self.layout.attention.take_batch(batch)
        _, token = self.shard.loss(params, batch["tokens"], batch["targets"], None, batch.get("documents"))
        weight_BT = batch["weights"]
        correct_BT = weight_BT * token.correct_BT.astype(jnp.float32)
        sums = Sums(weight_BT, weight_BT * token.nats_BT, correct_BT, batch.get("bytes", weight_BT * 0))
        return jax.tree.map(jnp.sum, sums)

    def add_z_loss(self, objective, z_loss):
        """Adds the mean squared log-partition with the coefficient of training."""
        weight = self.config.training.z_loss
        return objective + weight * z_loss if weight else objective

    def local_records(self, params, batch, dropout_key=None):
        """Returns the records of the layers for this shard's rows."""
        tokens = batch["tokens"].shape[1]
        batch = self.layout.attention.take_batch(batch)
        dropout = self.draw_masks(dropout_key, batch, tokens)
        return self.shard.record(params, batch["tokens"], dropout, batch.get("documents"))

    def draw_masks(self, dropout_key, batch, tokens: int) -> Dropout | None:
        """Returns the dropout of this shard's rows, which have `tokens` tokens over all shards of cp; None without."""
        c = self.config
        if dropout_key is None or not (c.training.dropout or c.lora.lora_dropout):
            return None
        key = jax.random.wrap_key_data(dropout_key, impl=THREEFRY)
        position_T = self.layout.attention.positions(tokens // c.parallel.cp) if c.parallel.cp > 1 else None
        return Dropout(c.training.dropout, key, batch["examples"], c.parallel.sequence_parallel, position_T)


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


@functools.lru_cache
def _parameter_shapes(architecture: Config):
    return jax.eval_shape(functools.partial(_initialise, architecture), np.int32(0))


@functools.partial(jax.jit, static_argnums=0, inline=True)  # traced once for the shapes and the program
def _initialise(architecture: Config, seed):
    """Draws the parameters by the shard modules on size-1 axes, where a shard is the full model."""
    plain = architecture.replace(lora_rank=0)  # the other parameters do not depend on adapters
    key = jax.random.key(seed, impl=THREEFRY)
    params = CausalTransformerShard(resolve(plain)).init(key)
    return choose_trainable(architecture).add(params, jax.random.fold_in(key, Stream.LORA))
