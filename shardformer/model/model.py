"""Shard view <-> global view: the only module that owns a `shard_map`.

Inside, an array is one shard's slice and collectives are written out. Outside, an array is global and carries a
`NamedSharding`, and XLA inserts the collectives.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, tree_util
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import programs
from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.context import split_cache, zigzag
from shardformer.hardware.chips import Chip, find_chip
from shardformer.kernels import example_norms, named_axes
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.kernels.layer_exchange import apply_to_full_matrices
from shardformer.kernels.microbatch import AccumulationType, microbatch
from shardformer.kernels.squares import sum_squares
from shardformer.kernels.staged_scatter import choose_scattering
from shardformer.kernels.threefry import STANDARD, THREEFRY
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.model import lora, master_weights
from shardformer.parallel import mesh_axes, specs, torus
from shardformer.shards import CausalTransformerShard, DataParallel, Dropout
from shardformer.shards.attention import choose_method
from shardformer.shards.parameters import map_stacked

ROWS = P("dp")  # batch rows: split over dp, replicated over mp; see also Model.row_spec


class Loss(NamedTuple):
    """Means over the tokens of a batch."""

    loss: jax.Array  # cross-entropy in nats per token
    z_loss: jax.Array  # the squared log-partition, before its coefficient
    accuracy: jax.Array


class Sums(NamedTuple):
    """Weighted sums over the tokens of a batch, for an evaluation of several batches."""

    tokens: jax.Array
    nats: jax.Array
    correct: jax.Array
    bytes: jax.Array  # of the text that the targets stand for; 0 if the batch has no "bytes"


class Model:
    """The model of one configuration and mesh, as pure functions of global arrays, to be jitted by the caller."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.row_spec = ROWS if config.pp == 1 else P(("dp", "pp"))  # each stage embeds different rows
        # A layer's keys or values [B, H, S, K]: rows split over dp, heads over mp, slots over cp.
        self.cache_spec = P("dp", "mp", "cp" if config.cp > 1 else None, None)
        self.shapes = self.abstract_parameters(config)
        self._dimensions = specs.zero_dimensions(self.shapes, config)
        self.specs = specs.split_over_dp(specs.parameter_specs(self.shapes, config), self._dimensions, config)
        self.grad_specs = lora.select_learned(self.specs, config)
        self.shardings = jax.tree.map(self.sharding, self.specs)
        # An abstract mesh is for tracing, and no device's kernel can be traced.
        hardware = describe_hardware(mesh.devices.flat[0]) if isinstance(mesh, Mesh) else CPU
        way = choose_scattering(torus.factor_dp(mesh), hardware, mesh.size)
        self.data_parallel = DataParallel(config, self._dimensions, way)
        self._shard = CausalTransformerShard(config, self.data_parallel, hardware)
        any_length = config.without_gradients().replace(sequence_parallel=False)
        self._sampler = CausalTransformerShard(any_length, self.data_parallel.by_layer())
        self.unstacked_specs = map_stacked(lambda name, spec: [P(*spec[1:])] * config.layers, self.specs)
        initialise = functools.partial(_initialise, config.architecture)
        self._init = programs.jit(initialise, out_shardings=self.shardings)

    @property
    def abstract(self):
        """The parameters' shapes and shardings without arrays, onto which a checkpoint is restored."""
        return master_weights.round_shapes(with_shardings(self.shapes, self.shardings), self.config)

    @property
    def not_scattered(self) -> list[str]:
        """The parameters that ZeRO leaves replicated over dp, because none of their dimensions divides."""
        if not self.config.zero or self.config.replicas == 1:
            return []
        return [f"{m}/{name}" for m, leaves in self._dimensions.items() for name, d in leaves.items() if d is None]

    def check_attention(self) -> None:
        """Raises UsageError for attention=fused if the mesh's devices have no kernel for it."""
        c = self.config
        if isinstance(self.mesh, Mesh):
            choose_method(c, self._shard.hardware, c.seq // c.cp, bool(c.dropout), c.mask_documents)

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @staticmethod
    def abstract_parameters(config: Config):
        """Returns the parameter tree with global shapes; touches no device."""
        # The cached tree is copied: a caller may change its dictionaries.
        return jax.tree.map(lambda leaf: leaf, _parameter_shapes(config.architecture))

    def init(self, seed: int):
        """Returns the parameters of a seed, bitwise the same on every mesh; no device holds more than its slice.

        Returns float32; a training state stores them rounded by `round_parameters`.
        """
        return self._init(np.int32(seed))

    def loss_and_grad(self, params, batch, dropout_key):
        """Returns the batch's `Loss` and the gradient of its objective, which ZeRO splits over dp.

        Runs the `accum` microbatches in sequence, or through the pipeline if pp > 1.
        """

        def body(params, batch, dropout_key):
            params = self.data_parallel.make_local(params)

            def grad(batch):
                return self._local_loss_and_grad(params, batch, dropout_key)

            if self.config.accum > 1 and self.config.pp == 1:
                grad = microbatch(grad, argnums=0, microbatch_size=self._microbatch_rows(batch))
            return self._mean(*grad(self._number_rows(batch)))

        return self._shard_map(body, (self.specs, self.row_spec, P()), (P(), self.grad_specs))(
            params, _normalise(batch), dropout_key
        )

    def loss_and_grad_of_part(self, params, batch, dropout_key, part):
        """Returns the `Loss` and the gradient of microbatch number `part` of the `accum` microbatches."""

        def body(params, batch, dropout_key, part):
            size = self._microbatch_rows(batch)
            rows = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part * size, size), self._number_rows(batch))
            return self._mean(*self._local_loss_and_grad(self.data_parallel.make_local(params), rows, dropout_key))

        in_specs = (self.specs, self.row_spec, P(), P())
        return self._shard_map(body, in_specs, (P(), self.grad_specs))(params, _normalise(batch), dropout_key, part)

    def loss(self, params, batch, dropout_key=None) -> Loss:
        """Returns metrics only; differentiate `objective` instead. No dropout if `dropout_key` is None."""
        return self._evaluate(params, batch, dropout_key)[1]

    def example_square_norms(self, params, batch, dropout_key):
        """Returns the squared norm of every example's gradient by parameter, split over dp; see example_norms.py."""

        def body(params, batch, dropout_key):
            params = self.data_parallel.make_local(params)
            trainable = lora.select_learned(params, self.config)

            def objective(trainable, row):
                return self._objective(lora.replace_learned(params, trainable), row, dropout_key)[0]

            return example_norms.measure_squares(objective, trainable, self._number_rows(batch), self.grad_specs)

        return self._shard_map(body, (self.specs, self.row_spec, P()), self.row_spec)(
            params, _normalise(batch), dropout_key
        )

    def objective(self, trainable, params, batch, dropout_key):
        """Returns the minimised loss as a function of the trainable parameters, for a line search."""
        return self._evaluate(lora.replace_learned(params, trainable), batch, dropout_key)[0]

    def norm(self, grads) -> jax.Array:
        """Returns the global norm of a tree like the gradient."""

        def body(grads):
            return sum_squares(jax.tree.leaves(grads), jax.tree.leaves(self.grad_specs))

        return jnp.sqrt(self._shard_map(body, (self.grad_specs,), P())(grads))

    def map_matrices(self, function, tree):
        """Applies a function of full matrices [layers, D, F] to a tree of some of the layers' gradients or moments."""
        layout = tree_util.tree_map_with_path(lambda path, _: self.grad_specs[path[0].key][path[1].key], tree)

        def body(tree):
            return jax.tree.map(functools.partial(apply_to_full_matrices, function), tree, layout)

        return self._shard_map(body, (layout,), layout)(tree)

    def sums(self, params, batch) -> Sums:
        """Returns the sums of a batch in which each target has a weight (0 for padding).

        Runs `accum` microbatches in sequence, as a step does.
        """

        def body(params, batch):
            params = self.data_parallel.make_local(params)

            def sums(batch):
                batch = zigzag.take_own_tokens(batch, self.config.cp)
                _, token = self._shard.loss(params, batch["tokens"], batch["targets"], None, batch.get("documents"))
                weight_BT = batch["weights"]
                correct_BT = weight_BT * token.correct_BT.astype(jnp.float32)
                sums = Sums(weight_BT, weight_BT * token.nats_BT, correct_BT, batch.get("bytes", weight_BT * 0))
                return jax.tree.map(jnp.sum, sums)

            if self.config.accum > 1 and self.config.pp == 1:
                sums = microbatch(sums, 0, self._microbatch_rows(batch), AccumulationType.SUM)
            return named_axes.psum(sums(batch), self.config.token_axes)

        return self._shard_map(body, (self.specs, self.row_spec), P())(params, batch)

    def token_loss(self, params, tokens, targets) -> TokenLoss:
        """Returns the loss of every token, split over dp."""
        cp = self.config.cp

        def body(params, tokens, targets):
            own = zigzag.take_own(tokens, cp), zigzag.take_own(targets, cp)
            return zigzag.join_rows(self._shard.loss(self.data_parallel.make_local(params), *own)[1], cp)

        return self._shard_map(body, (self.specs, self.row_spec, self.row_spec), self.row_spec)(params, tokens, targets)

    def logits(self, params, tokens):
        """Returns float32 logits [B, T, V]: rows split over dp, vocabulary over mp; padded entries are -inf."""
        return self._shard_map(self._sampler.logits, (self.specs, self.row_spec), P(*self.row_spec, None, "mp"))(
            params, tokens
        )

    def prefill(self, params, tokens, lengths, end, cache_size: int):
        """Returns logits [B, V] after the first lengths[b] of each row of tokens [B, S], and each layer's cache.

        Rows are split over dp. In the caches, which are rings, every row ends just before slot `end`. A cache has
        `cache_size` slots, or fewer if the layer's window is shorter, rounded up to a multiple of cp.
        """
        cp = self.config.cp

        def body(params, tokens_BS, length_B, end):
            def one(tokens_S, length):
                def align(cache, window):
                    return split_cache.align(cache, min(cache_size, window or cache_size), length, end, cp)

                logits_1v, caches = self._sampler.prefill(params, tokens_S[None], length)
                return logits_1v[0], list(map(align, caches, self.config.layer_windows))

            return jax.vmap(one)(zigzag.take_own(tokens_BS, cp), length_B)

        in_specs = (self.specs, ROWS, ROWS, P())
        return self._shard_map(body, in_specs, (P("dp", "mp"), self.cache_spec))(params, tokens, lengths, end)

    def decode(self, unstacked, token, positions, caches, slot):
        """Returns logits [B, V] after one more token per row, and the caches with that token in `slot`.

        Each row has its own position. `unstacked` holds the parameters of each layer as a list.
        """

        def body(unstacked, token_B, position_B, caches, slot):
            def one(token, position, caches):
                caches = jax.tree.map(lambda x_hSK: x_hSK[None], caches)
                logits_1v, caches = self._sampler.decode(unstacked, token[None], position, caches, slot)
                return logits_1v[0], jax.tree.map(lambda x_1hSK: x_1hSK[0], caches)

            return jax.vmap(one)(token_B, position_B, caches)

        in_specs = (self.unstacked_specs, ROWS, ROWS, self.cache_spec, P())
        out_specs = P("dp", "mp"), self.cache_spec
        return self._shard_map(body, in_specs, out_specs)(unstacked, token, positions, caches, slot)

    def _evaluate(self, params, batch, dropout_key):
        """Returns (the minimised loss, `Loss`) of the batch."""

        def body(params, batch, dropout_key):
            params = self.data_parallel.make_local(params)
            found = self._objective(params, self._number_rows(batch), dropout_key)
            return named_axes.pmean(found, self.config.token_axes)

        return self._shard_map(body, (self.specs, self.row_spec, P()), P())(params, _normalise(batch), dropout_key)

    def _shard_map(self, body, in_specs, out_specs):
        in_specs, out_specs = mesh_axes.drop_unit_axes((in_specs, out_specs), self.mesh)
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    # Shard view: the parts of the bodies above.

    def _local_loss_and_grad(self, params, batch, dropout_key):
        """Returns `Loss` and the gradient over only this shard's rows, in float32 for the sums that follow."""

        def objective(trainable):
            return self._objective(lora.replace_learned(params, trainable), batch, dropout_key)

        (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(lora.select_learned(params, self.config))
        return losses, jax.tree.map(lambda g: g.astype(jnp.float32), grads)

    def _mean(self, losses, grads):
        """Averages over all rows of the batch."""
        losses = named_axes.pmean(jnp.stack(losses), self.config.token_axes)  # one collective
        return Loss(*losses), self.data_parallel.mean(grads)

    def _number_rows(self, batch):
        """Adds to this shard's rows their numbers in the global batch."""
        rows = batch["tokens"].shape[0]
        return batch | {"examples": named_axes.index(self.row_spec[0]) * rows + jnp.arange(rows)}

    def _objective(self, params, batch, dropout_key=None):
        """Returns (the minimised loss, `Loss`) of this shard's rows."""
        c, dropout, seq = self.config, None, batch["tokens"].shape[1]
        batch = zigzag.take_own_tokens(batch, c.cp)
        if (c.dropout or c.lora_dropout) and dropout_key is not None:
            key = jax.random.wrap_key_data(dropout_key, impl=STANDARD)
            position_T = zigzag.own_positions(seq, c.cp) if c.cp > 1 else None
            dropout = Dropout(c.dropout, key, batch["examples"], c.sequence_parallel, position_T)
        weights = batch.get("weights")
        objective, token = self._shard.loss(
            params, batch["tokens"], batch["targets"], dropout, batch.get("documents"), weights
        )
        by_token = Loss(token.nats_BT, jnp.square(token.log_z_BT), token.correct_BT.astype(jnp.float32))
        losses = jax.tree.map(lambda x_BT: (x_BT if weights is None else x_BT * weights).mean(), by_token)
        return objective, lax.stop_gradient(losses)

    def _microbatch_rows(self, batch) -> int:
        return batch["tokens"].shape[0] // self.config.accum


def describe_hardware(device: jax.Device) -> Hardware:
    """Returns the properties of a device, with the rates of its chip if the table has it."""
    hardware, chip = Hardware.of_device(device), find_chip(device.device_kind)
    return describe_chip(device.platform, chip)._replace(capability=hardware.capability) if chip else hardware


def describe_chip(platform: str, chip: Chip) -> Hardware:
    """Returns the properties of a device of this chip."""
    return Hardware(platform, chip.capability, chip.flops, chip.axis_wire, chip.exchanging)


def _normalise(batch):
    """Scales the weights to mean 1 over the global batch: means over its parts are then weighted. Global view."""
    if "weights" not in batch:
        return batch
    return batch | {"weights": batch["weights"] / jnp.maximum(batch["weights"].mean(), jnp.finfo(jnp.float32).tiny)}


def with_shardings(shapes, shardings):
    """Returns the tree of ShapeDtypeStructs with these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


@functools.lru_cache
def _parameter_shapes(architecture: Config):
    return jax.eval_shape(lambda: _initialise(architecture, 0))


def _initialise(architecture: Config, seed):
    """Draws the parameters by the shard modules on size-1 axes, where a shard is the full model."""
    plain = architecture.replace(lora_rank=0)  # the other parameters do not depend on adapters
    initialise = CausalTransformerShard(plain, DataParallel(plain, {})).init
    for axis in ("dp", "mp"):
        initialise = jax.vmap(initialise, in_axes=None, axis_size=1, axis_name=axis)
    key = jax.random.key(seed, impl=THREEFRY)
    params = jax.tree.map(lambda p: p[0, 0], initialise(key))
    return lora.add_adapters(params, architecture, jax.random.fold_in(key, Stream.LORA))
