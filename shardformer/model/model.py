"""Shard view <-> global view: the only module that owns a `shard_map`.

Inside, an array is one shard's slice and collectives are written out; outside, arrays are whole, carry a
`NamedSharding`, and XLA inserts the collectives.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.kernels.microbatch import AccumulationType, microbatch
from shardformer.kernels.threefry import STANDARD, THREEFRY
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.model import lora, master_weights
from shardformer.parallel import specs, torus
from shardformer.shards import CausalTransformerShard, DataParallel, Dropout, example_norms, stages
from shardformer.shards.attention import choose_method
from shardformer.shards.parameters import map_stacked

ROWS = P("dp")  # of a batch: sequences over dp, the same on every shard of the model; see also Model.row_spec
CACHE = P("dp", "mp", None, None)  # [B, H, S, K] of a layer: every shard keeps its rows' keys and values of its heads


class Loss(NamedTuple):
    """Means over the tokens of a batch."""

    loss: jax.Array  # cross-entropy in nats per token
    z_loss: jax.Array  # the squared log-partition, before its coefficient
    accuracy: jax.Array


class Sums(NamedTuple):
    """Weighted sums over the tokens of a batch, for an evaluation that covers a text in several of them."""

    tokens: jax.Array
    nats: jax.Array
    correct: jax.Array
    bytes: jax.Array  # of text; 0 where the batch does not say how many each target stands for


class Model:
    """The functions of one (config, mesh) on global arrays. All are pure; jit them as you like."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.row_spec = ROWS if config.pp == 1 else P(("dp", "pp"))  # each stage embeds rows of its own
        self.shapes = self.abstract_parameters(config)
        self._dimensions = specs.zero_dimensions(self.shapes, config)
        self.specs = specs.split_over_dp(specs.parameter_specs(self.shapes, config), self._dimensions)
        self.grad_specs = lora.select_learned(self.specs, config)
        self.shardings = jax.tree.map(self.sharding, self.specs)
        self.data_parallel = DataParallel(config, self._dimensions, torus.factor_dp(mesh))
        # A mesh without devices is for tracing, and no kernel of a device can be traced.
        hardware = Hardware.of_device(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else CPU
        self._shard = CausalTransformerShard(config, self.data_parallel, hardware)
        any_length = config.without_gradients().replace(sequence_parallel=False)
        self._sampler = CausalTransformerShard(any_length, self.data_parallel.by_layer())
        self.unstacked_specs = map_stacked(lambda name, spec: [P(*spec[1:])] * config.layers, self.specs)
        self._init = jax.jit(functools.partial(_initialise, config.architecture), out_shardings=self.shardings)

    @property
    def abstract(self):
        """The parameters' shapes and shardings without arrays: what a checkpoint restores onto."""
        return master_weights.round_shapes(with_shardings(self.shapes, self.shardings), self.config)

    @property
    def not_scattered(self) -> list[str]:
        """With ZeRO, the parameters that stay whole on every dp because none of their dimensions divides."""
        if not self.config.zero:
            return []
        return [f"{m}/{name}" for m, leaves in self._dimensions.items() for name, d in leaves.items() if d is None]

    def check_attention(self) -> None:
        """Refuses attention=fused where the devices of the mesh have no kernel for it."""
        c = self.config
        if isinstance(self.mesh, Mesh):
            choose_method(c, self._shard.hardware, c.seq, bool(c.dropout), c.mask_documents)

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @staticmethod
    def abstract_parameters(config: Config):
        """The parameter tree's names and global shapes; touches no device."""
        return jax.tree.map(lambda leaf: leaf, _parameter_shapes(config.architecture))  # dictionaries of the caller's

    def init(self, seed: int):
        """The parameters of a seed: bitwise the same on every mesh, and no device ever holds more than its slice.

        They are in float32, from which `masters.round_parameters` makes what a training state stores.
        """
        return self._init(np.int32(seed))

    def loss_and_grad(self, params, batch, dropout_key):
        """`Loss` over the batch and the gradient of its training objective: whole, or split over dp as well (ZeRO).

        The batch is cut into `accum` microbatches, one after the other, or one stage after the other.
        """

        def body(params, batch, dropout_key):
            params = self._make_local(params)
            grad = lambda batch: self._local_loss_and_grad(params, batch, dropout_key)
            if self.config.accum > 1 and self.config.pp == 1:
                grad = microbatch(grad, argnums=0, microbatch_size=self._microbatch_rows(batch))
            return self._mean(*grad(self._number_rows(batch)))

        return self._shard_map(body, (self.specs, self.row_spec, P()), (P(), self.grad_specs))(
            params, _normalise(batch), dropout_key
        )

    def loss_and_grad_of_part(self, params, batch, dropout_key, part):
        """The same of one of the `accum` microbatches."""

        def body(params, batch, dropout_key, part):
            rows = self._microbatch_rows(batch)
            cut = lambda x: lax.dynamic_slice_in_dim(x, part * rows, rows)
            batch, params = jax.tree.map(cut, self._number_rows(batch)), self._make_local(params)
            return self._mean(*self._local_loss_and_grad(params, batch, dropout_key))

        in_specs = (self.specs, self.row_spec, P(), P())
        return self._shard_map(body, in_specs, (P(), self.grad_specs))(params, _normalise(batch), dropout_key, part)

    def loss(self, params, batch, dropout_key=None) -> Loss:
        """`Loss` alone, which has no gradient: `objective` has. Without a key, without dropout."""
        return self._evaluate(params, batch, dropout_key)[1]

    def example_square_norms(self, params, batch, dropout_key):
        """The squared norm of every example's gradient, for each parameter, split over dp; see example_norms.py."""

        def body(params, batch, dropout_key):
            params = self._make_local(params)
            objective = lambda learned, row: self._objective(lora.replace_learned(params, learned), row, dropout_key)[0]
            learned, split = (lora.select_learned(tree, self.config) for tree in (params, self.specs))
            return example_norms.measure_squares(objective, learned, self._number_rows(batch), split)

        return self._shard_map(body, (self.specs, self.row_spec, P()), self.row_spec)(
            params, _normalise(batch), dropout_key
        )

    def objective(self, learned, params, batch, dropout_key):
        """What is minimised, as a function of what learns: for an optimizer that searches along a line."""
        return self._evaluate(lora.replace_learned(params, learned), batch, dropout_key)[0]

    def sums(self, params, batch) -> Sums:
        """The sums of a batch in which each target has a weight (0 for padding): cut by `accum`, as a step's is."""

        def body(params, batch):
            params = self.data_parallel.make_local(params)

            def sums(batch):
                _, token = self._shard.loss(params, batch["tokens"], batch["targets"], None, batch.get("documents"))
                weight_BT = batch["weights"]
                correct_BT = weight_BT * token.correct_BT.astype(jnp.float32)
                sums = Sums(weight_BT, weight_BT * token.nats_BT, correct_BT, batch.get("bytes", weight_BT * 0))
                return jax.tree.map(jnp.sum, sums)

            if self.config.accum > 1 and self.config.pp == 1:
                sums = microbatch(sums, 0, self._microbatch_rows(batch), AccumulationType.SUM)
            return lax.psum(sums(batch), self.row_spec[0])

        return self._shard_map(body, (self.specs, self.row_spec), P())(params, batch)

    def token_loss(self, params, tokens, targets) -> TokenLoss:
        """Of every token, split over dp."""
        body = lambda params, *rows: self._shard.loss(self.data_parallel.make_local(params), *rows)[1]
        return self._shard_map(body, (self.specs, self.row_spec, self.row_spec), self.row_spec)(params, tokens, targets)

    def logits(self, params, tokens):
        """[B, T, V] in float32, split over dp and, on the vocabulary, over mp; padded entries are -inf."""
        return self._shard_map(self._sampler.logits, (self.specs, self.row_spec), P(*self.row_spec, None, "mp"))(
            params, tokens
        )

    def prefill(self, params, tokens, lengths, end, cache_size: int):
        """[B, V] after the first lengths[b] of each row of [B, S] tokens, and each layer's cache; dp splits the rows.

        All rows of a cache end together, just before slot `end`.
        """

        def body(params, tokens_BS, length_B, end):
            def one(tokens_S, length):
                def align(x_1hSK):
                    space = (0, cache_size - x_1hSK.shape[2])
                    return jnp.roll(jnp.pad(x_1hSK[0], ((0, 0), space, (0, 0))), end - length, axis=1)

                logits_1v, caches = self._sampler.prefill(params, tokens_S[None], length)
                return logits_1v[0], jax.tree.map(align, caches)

            return jax.vmap(one)(tokens_BS, length_B)

        in_specs = (self.specs, ROWS, ROWS, P())
        return self._shard_map(body, in_specs, (P("dp", "mp"), CACHE))(params, tokens, lengths, end)

    def decode(self, unstacked, token, positions, caches, slot):
        """[B, V] after one more token per row, each at a position of its own, and the caches with it in this slot.

        `unstacked`: the parameters, those of the layers as a list of their arrays.
        """

        def body(unstacked, token_B, position_B, caches, slot):
            def one(token, position, caches):
                caches = jax.tree.map(lambda x_hSK: x_hSK[None], caches)
                logits_1v, caches = self._sampler.decode(unstacked, token[None], position, caches, slot)
                return logits_1v[0], jax.tree.map(lambda x_1hSK: x_1hSK[0], caches)

            return jax.vmap(one)(token_B, position_B, caches)

        in_specs, out_specs = (self.unstacked_specs, ROWS, ROWS, CACHE, P()), (P("dp", "mp"), CACHE)
        return self._shard_map(body, in_specs, out_specs)(unstacked, token, positions, caches, slot)

    def _evaluate(self, params, batch, dropout_key):
        """(what is minimised, `Loss`) over the batch."""

        def body(params, batch, dropout_key):
            params = self._make_local(params)
            return lax.pmean(self._objective(params, self._number_rows(batch), dropout_key), self.row_spec[0])

        return self._shard_map(body, (self.specs, self.row_spec, P()), P())(params, _normalise(batch), dropout_key)

    def _shard_map(self, body, in_specs, out_specs):
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    # Shard view: what the bodies above are made of.

    def _local_loss_and_grad(self, params, batch, dropout_key):
        """`Loss` and the gradient over this shard's rows alone, to be summed in float32."""
        objective = lambda learned: self._objective(lora.replace_learned(params, learned), batch, dropout_key)
        (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(lora.select_learned(params, self.config))
        return losses, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def _make_local(self, params):
        """Parameters whose gradients stay on each shard until `_mean` averages them."""
        params = self.data_parallel.make_local(params)
        return params if self.config.pp == 1 else stages.make_local(params)

    def _mean(self, losses, grads):
        """The means over all rows of the batch."""
        losses, grads = lax.pmean(losses, self.row_spec[0]), self.data_parallel.mean(grads)
        return losses, grads if self.config.pp == 1 else stages.mean(grads)

    def _number_rows(self, batch):
        """The rows of this shard with their numbers in the global batch."""
        rows = batch["tokens"].shape[0]
        return batch | {"examples": lax.axis_index(self.row_spec[0]) * rows + jnp.arange(rows)}

    def _objective(self, params, batch, dropout_key=None):
        """(what is minimised, `Loss`) over this shard's rows."""
        dropout = None
        if self.config.dropout and dropout_key is not None:
            key = jax.random.wrap_key_data(dropout_key, impl=STANDARD)
            dropout = Dropout(self.config.dropout, key, batch["examples"], self.config.sequence_parallel)
        weights = batch.get("weights")
        objective, token = self._shard.loss(
            params, batch["tokens"], batch["targets"], dropout, batch.get("documents"), weights
        )
        mean = lambda x_BT: (x_BT if weights is None else x_BT * weights).mean()
        losses = Loss(mean(token.nats_BT), mean(jnp.square(token.log_z_BT)), mean(token.correct_BT.astype(jnp.float32)))
        return objective, lax.stop_gradient(losses)

    def _microbatch_rows(self, batch) -> int:
        return batch["tokens"].shape[0] // self.config.accum


def _normalise(batch):
    """Weights of mean 1 over the whole batch: plain means, of any parts of it, are then weighted means. Global view."""
    if "weights" not in batch:
        return batch
    return batch | {"weights": batch["weights"] / jnp.maximum(batch["weights"].mean(), jnp.finfo(jnp.float32).tiny)}


def with_shardings(shapes, shardings):
    """The tree of ShapeDtypeStructs that carry these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


@functools.lru_cache
def _parameter_shapes(architecture: Config):
    return jax.eval_shape(lambda: _initialise(architecture, 0))


def _initialise(architecture: Config, seed):
    """Trace the shard modules on size-1 axes, where a shard is the whole model."""
    plain = architecture.replace(lora_rank=0)  # adapters leave the other parameters as they are
    initialise = CausalTransformerShard(plain, DataParallel(plain, {})).init
    for axis in ("dp", "mp"):
        initialise = jax.vmap(initialise, in_axes=None, axis_size=1, axis_name=axis)
    key = jax.random.key(seed, impl=THREEFRY)
    params = jax.tree.map(lambda p: p[0, 0], initialise(key))
    return lora.add_adapters(params, architecture, jax.random.fold_in(key, Stream.LORA))
