"""Shard view <-> global view: the only module that owns a `shard_map`.

Below this line an array is one shard's slice and collectives are written out; above it, arrays are whole, carry a
`NamedSharding`, and XLA does the rest.
"""

from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import specs
from shardformer.config import Config
from shardformer.shards import CausalTransformerShard, Dropout

ROWS = P("dp")  # of a batch: sequences over dp, the same on every shard of the model
CACHE = P(None, None, None, "mp", None)  # [L, B, S, H, K]: every shard keeps its heads' keys and values


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


class Model:
    """The functions of one (config, mesh) on global arrays. All are pure; jit them as you like."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self._shard = _shard_functions(config)
        self.shapes = self.abstract_parameters(config)
        self.specs = specs.tree(self.shapes, config)
        self.shardings = jax.tree.map(self.sharding, self.specs)
        initialise = lambda seed: _initialise(self._shard, config, seed)
        self._init = jax.jit(initialise, out_shardings=self.shardings)

    @property
    def abstract(self):
        """The parameters' shapes and shardings without arrays: what a checkpoint restores onto."""
        return with_shardings(self.shapes, self.shardings)

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @staticmethod
    def abstract_parameters(config: Config):
        """The parameter tree's names and global shapes; touches no device."""
        return jax.eval_shape(lambda: _initialise(_shard_functions(config), config, 0))

    def init(self, seed: int):
        """The parameters of a seed: bitwise the same on every mesh, and no device ever holds more than its slice."""
        return self._init(np.int32(seed))

    def loss_and_grad(self, params, batch, dropout_key):
        """`Loss` over the batch and the gradient of its training objective, both whole."""

        def body(params, batch, dropout_key):
            objective = lambda params: self._objective(params, batch, dropout_key)
            (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(_vary_over_dp(params))
            return lax.pmean((losses, grads), "dp")

        in_specs = (self.specs, ROWS, P())
        return self._shard_map(body, in_specs, (P(), self.specs))(params, batch, dropout_key)

    def loss(self, params, batch, dropout_key=None) -> Loss:
        """`Loss` alone, to be differentiated from outside if need be; without a key, without dropout."""

        def body(params, batch, *dropout_key):
            return lax.pmean(self._objective(_vary_over_dp(params), batch, *dropout_key)[1], "dp")

        keys = () if dropout_key is None else (dropout_key,)
        return self._shard_map(body, (self.specs, ROWS, *[P() for _ in keys]), P())(params, batch, *keys)

    def sums(self, params, batch) -> Sums:
        """The sums of a batch in which each target has a weight (0 for padding)."""

        def body(params, batch):
            token = self._shard.loss(params, batch["tokens"], batch["targets"])
            weight_BT = batch["weights"]
            sums = Sums(weight_BT, weight_BT * token.nats_BT, weight_BT * token.correct_BT.astype(jnp.float32))
            return lax.psum(jax.tree.map(jnp.sum, sums), "dp")

        return self._shard_map(body, (self.specs, ROWS), P())(params, batch)

    def logits(self, params, tokens):
        """[B, T, V] in float32, split over dp and, on the vocabulary, over mp; padded entries are -inf."""
        return self._shard_map(self._shard.logits, (self.specs, ROWS), P("dp", None, "mp"))(params, tokens)

    def prefill(self, params, tokens, length):
        """[B, V] after the first `length` of [B, S] tokens, and the cache. Rows are the same on every dp."""
        out_specs = (P(None, "mp"), CACHE)
        return self._shard_map(self._shard.prefill, (self.specs, P(), P()), out_specs)(params, tokens, length)

    def decode(self, params, token, position, cache):
        """[B, V] after one more token per row, which stands at `position`, and the cache with it."""
        in_specs, out_specs = (self.specs, P(), P(), CACHE), (P(None, "mp"), CACHE)
        return self._shard_map(self._shard.decode, in_specs, out_specs)(params, token, position, cache)

    def _shard_map(self, body, in_specs, out_specs):
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def _objective(self, params, batch, dropout_key=None):
        """(what is minimised, `Loss`) over this shard's rows; shard view."""
        rows = batch["tokens"].shape[0]
        dropout = None
        if self.config.dropout and dropout_key is not None:
            example_B = lax.axis_index("dp") * rows + jnp.arange(rows)
            dropout = Dropout(self.config.dropout, jax.random.wrap_key_data(dropout_key), example_B)
        token = self._shard.loss(params, batch["tokens"], batch["targets"], dropout)
        losses = Loss(
            token.nats_BT.mean(), jnp.square(token.log_z_BT).mean(), token.correct_BT.astype(jnp.float32).mean()
        )
        return losses.loss + self.config.z_loss * losses.z_loss, losses


def _vary_over_dp(params):
    """Parameters whose gradient stays local through every scan, to be summed over dp once, at the end; shard view."""
    return jax.tree.map(lambda p: lax.pcast(p, "dp", to="varying"), params)


def with_shardings(shapes, shardings):
    """The tree of ShapeDtypeStructs that carry these shardings."""
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), shapes, shardings
    )


def _initialise(shard: "_ShardFunctions", config: Config, seed):
    """Trace the shard modules on size-1 axes, where a shard is the whole model."""
    tokens_BT = jnp.zeros((1, config.seq), jnp.int32)
    initialise = lambda seed: shard.init(jax.random.key(seed), tokens_BT)
    for axis in ("dp", "mp"):
        initialise = jax.vmap(initialise, in_axes=None, axis_size=1, axis_name=axis)
    return jax.tree.map(lambda p: p[0, 0], initialise(seed))


class _ShardFunctions(NamedTuple):
    init: Callable
    logits: Callable
    loss: Callable
    prefill: Callable
    decode: Callable


def _shard_functions(config: Config) -> _ShardFunctions:
    """The shard module's methods as functions of its parameters."""

    def methods():
        shard = CausalTransformerShard(config)
        return shard, (shard, shard.loss, shard.prefill, shard.decode)

    transformed = hk.multi_transform(methods)
    applies = [lambda params, *args, f=f: f(params, None, *args) for f in transformed.apply]
    return _ShardFunctions(transformed.init, *applies)
