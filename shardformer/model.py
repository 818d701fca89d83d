"""Shard view <-> global view: the only module that owns a `shard_map`.

Below this line an array is one shard's slice and collectives are written out; above it, arrays are whole, carry a
`NamedSharding`, and XLA does the rest.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import lora, specs
from shardformer.checks import MATRICES
from shardformer.config import Config
from shardformer.shards import CausalTransformerShard, Dropout, example_norms
from shardformer.shards.microbatch import AccumulationType, microbatch

ROWS = P("dp")  # of a batch: sequences over dp, the same on every shard of the model
CACHE = P(None, None, None, "mp", None)  # [L, B, S, H, K]: every shard keeps its heads' keys and values


LORA_STREAM = 1 << 21  # far from the keys that initialisation splits off the same seed


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
    bytes: jax.Array  # of text, where the batch says how many each target stands for


class Model:
    """The functions of one (config, mesh) on global arrays. All are pure; jit them as you like."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.mesh = mesh
        self.shapes = self.abstract_parameters(config)
        self._scattered = specs.scattered(self.shapes, config)
        self.specs = specs.tree(self.shapes, config)
        scattered_specs = specs.over_dp(self.specs, self._scattered)
        self.grad_specs = lora.learned(scattered_specs, config)
        if config.zero == 3:
            self.specs = scattered_specs
        self.shardings = jax.tree.map(self.sharding, self.specs)
        self._shard = _shard_functions(config, self._layer_parameters)
        self._writer = _shard_functions(config, functools.partial(self._layer_parameters, to="invarying"))
        initialise = lambda seed: _initialise(_shard_functions(config), config, seed)
        self._init = jax.jit(initialise, out_shardings=self.shardings)

    @property
    def abstract(self):
        """The parameters' shapes and shardings without arrays: what a checkpoint restores onto."""
        return with_shardings(self.shapes, self.shardings)

    @property
    def not_scattered(self) -> list[str]:
        """With ZeRO, the parameters that stay whole on every dp because none of their dimensions divides."""
        if not self.config.zero:
            return []
        return [f"{m}/{name}" for m, leaves in self._scattered.items() for name, d in leaves.items() if d is None]

    def sharding(self, spec: P) -> NamedSharding:
        return NamedSharding(self.mesh, spec)

    @staticmethod
    def abstract_parameters(config: Config):
        """The parameter tree's names and global shapes; touches no device."""
        return jax.eval_shape(lambda: _initialise(_shard_functions(config), config, 0))

    def init(self, seed: int):
        """The parameters of a seed: bitwise the same on every mesh, and no device ever holds more than its slice."""
        return self._init(np.int32(seed))

    def loss_and_grad(self, params, batch, dropout_key, part=None):
        """`Loss` over the batch and the gradient of its training objective: whole, or split over dp as well (ZeRO).

        The batch is cut into `accum` microbatches, one after the other; `part` is the number of the one to take alone.
        """

        def body(params, batch, dropout_key, *part):
            params = self._for_backward(params)
            grad = lambda batch: self._losses_and_grads(params, batch, dropout_key)
            rows = batch["tokens"].shape[0] // self.config.accum
            batch = _numbered(batch)
            if part:
                losses, grads = grad(jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, part[0] * rows, rows), batch))
            elif self.config.accum == 1:
                losses, grads = grad(batch)
            else:
                losses, grads = microbatch(grad, argnums=0, microbatch_size=rows)(batch)
            return lax.pmean(losses, "dp"), self._mean_over_dp(grads)

        parts = () if part is None else (part,)
        in_specs = (self.specs, ROWS, P(), *[P() for _ in parts])
        return self._shard_map(body, in_specs, (P(), self.grad_specs))(params, batch, dropout_key, *parts)

    def loss(self, params, batch, dropout_key=None) -> Loss:
        """`Loss` alone, to be differentiated from outside if need be; without a key, without dropout."""

        def body(params, batch, *dropout_key):
            params = self._for_backward(params)
            return lax.pmean(self._objective(params, _numbered(batch), *dropout_key)[1], "dp")

        keys = () if dropout_key is None else (dropout_key,)
        return self._shard_map(body, (self.specs, ROWS, *[P() for _ in keys]), P())(params, batch, *keys)

    def example_gradients(self, params, batch, dropout_key):
        """The squared norm of every example's gradient, for each parameter, split over dp: `example_norms.squares`."""

        def body(params, batch, dropout_key):
            params = self._for_backward(params)
            objective = lambda learned, row: self._objective(lora.with_learned(params, learned), row, dropout_key)[0]
            learned, split = (lora.learned(tree, self.config) for tree in (params, self.specs))
            return example_norms.squares(objective, learned, _numbered(batch), split)

        return self._shard_map(body, (self.specs, ROWS, P()), ROWS)(params, batch, dropout_key)

    def objective(self, learned, params, batch, dropout_key):
        """What is minimised, as a function of what learns: for an optimizer that searches along a line."""
        return self.total(self.loss(lora.with_learned(params, learned), batch, dropout_key))

    def sums(self, params, batch) -> Sums:
        """The sums of a batch in which each target has a weight (0 for padding): cut by `accum`, as a step's is."""

        def body(params, batch):
            def sums(batch):
                token = self._shard.loss(self._gathered(params), batch["tokens"], batch["targets"])
                weight_BT = batch["weights"]
                correct_BT = weight_BT * token.correct_BT.astype(jnp.float32)
                sums = Sums(weight_BT, weight_BT * token.nats_BT, correct_BT, batch.get("bytes", weight_BT * 0))
                return jax.tree.map(jnp.sum, sums)

            if self.config.accum > 1:
                rows = batch["tokens"].shape[0] // self.config.accum
                sums = microbatch(sums, 0, rows, AccumulationType.SUM)
            return lax.psum(sums(batch), "dp")

        return self._shard_map(body, (self.specs, ROWS), P())(params, batch)

    def logits(self, params, tokens):
        """[B, T, V] in float32, split over dp and, on the vocabulary, over mp; padded entries are -inf."""
        body = lambda params, tokens: self._shard.logits(self._gathered(params), tokens)
        return self._shard_map(body, (self.specs, ROWS), P("dp", None, "mp"))(params, tokens)

    def prefill(self, params, tokens, length):
        """[B, V] after the first `length` of [B, S] tokens, and the cache. Rows are the same on every dp."""
        in_specs, out_specs = (self.specs, P(), P()), (P(None, "mp"), CACHE)
        prefill = self._same_on_every_dp(self._writer.prefill)
        return self._shard_map(prefill, in_specs, out_specs)(params, tokens, length)

    def decode(self, params, token, position, cache):
        """[B, V] after one more token per row, which stands at `position`, and the cache with it."""
        in_specs, out_specs = (self.specs, P(), P(), CACHE), (P(None, "mp"), CACHE)
        decode = self._same_on_every_dp(self._writer.decode)
        return self._shard_map(decode, in_specs, out_specs)(params, token, position, cache)

    def _shard_map(self, body, in_specs, out_specs):
        return jax.shard_map(body, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs)

    def _losses_and_grads(self, params, batch, dropout_key):
        """`Loss` and the gradient over this shard's rows alone; shard view."""
        objective = lambda learned: self._objective(lora.with_learned(params, learned), batch, dropout_key)
        (_, losses), grads = jax.value_and_grad(objective, has_aux=True)(lora.learned(params, self.config))
        return losses, grads

    def _objective(self, params, batch, dropout_key=None):
        """(what is minimised, `Loss`) over this shard's rows; shard view."""
        dropout = None
        if self.config.dropout and dropout_key is not None:
            dropout = Dropout(self.config.dropout, jax.random.wrap_key_data(dropout_key), batch["examples"])
        token = self._shard.loss(self._gathered(params), batch["tokens"], batch["targets"], dropout)
        losses = Loss(
            token.nats_BT.mean(), jnp.square(token.log_z_BT).mean(), token.correct_BT.astype(jnp.float32).mean()
        )
        return self.total(losses), losses

    def total(self, losses: Loss):
        """What is minimised."""
        return losses.loss + self.config.z_loss * losses.z_loss

    def _for_backward(self, params):
        """Parameters whose gradient stays local through every scan, to be summed over dp once, at the end."""
        return self._leafwise(
            lambda p, dimension: p if self._stored_scattered(dimension) else lax.pcast(p, "dp", to="varying"), params
        )

    def _mean_over_dp(self, grads):
        """One collective for each gradient; with ZeRO every device keeps its part of the mean alone."""

        def mean(g, dimension):
            if self._stored_scattered(dimension):
                return g / self.config.dp  # summed by the transpose of its gathering
            if dimension is None:
                return lax.pmean(g, "dp")
            return lax.psum_scatter(g, "dp", scatter_dimension=dimension, tiled=True) / self.config.dp

        return self._leafwise(mean, grads)

    def _gathered(self, params, to="varying"):
        """What is used once, whole on every dp; a layer gathers its own parameters when its turn comes."""
        inside = lambda module: module.startswith(lora.LAYERS)
        gather = lambda p, dimension: self._gather(p, dimension, to)
        gathered = self._leafwise(gather, {m: leaves for m, leaves in params.items() if not inside(m)})
        return {m: gathered.get(m, leaves) for m, leaves in params.items()}

    def _layer_parameters(self, stored, to="varying"):
        """What one layer computes with: gathered over dp if they are split over it, adapters added in; shard view."""
        one_less = lambda dimension: None if dimension is None else dimension - 1  # without the leading L
        parameters = {
            module: {
                name: self._gather(p, one_less(self._scattered[f"transformer/{module}"][name]), to, self._wire(name))
                for name, p in leaves.items()
            }
            for module, leaves in stored.items()
        }
        return {module: lora.merged(leaves, self.config) for module, leaves in parameters.items()}

    def _wire(self, name: str) -> str:
        """The type in which a layer's parameter is gathered: that in which it multiplies, if nothing comes before."""
        adapted = self.config.lora_rank and name in self.config.lora_names
        return self.config.dtype if name in MATRICES and not adapted else "float32"

    def _gather(self, p, dimension, to="varying", dtype="float32"):
        return _gathered_in(p, dimension, dtype, to) if self._stored_scattered(dimension) else p

    def _stored_scattered(self, dimension) -> bool:
        return self.config.zero == 3 and dimension is not None

    def _leafwise(self, function, tree):
        """`function(leaf, the dimension that is split over dp)` of a tree with some of the parameters' names."""
        return {
            module: {name: function(leaf, self._scattered[module][name]) for name, leaf in leaves.items()}
            for module, leaves in tree.items()
        }

    def _same_on_every_dp(self, function):
        return lambda params, *args: function(self._gathered(params, to="invarying"), *args)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gathered_in(p, dimension, dtype, to):
    """Whole on every dp, after a trip in this type; its gradient is summed in the parameter's own, as without ZeRO."""
    return lax.all_gather(p.astype(dtype), "dp", axis=dimension, tiled=True, to=to)


def _gathered_in_forward(p, dimension, dtype, to):
    return _gathered_in(p, dimension, dtype, to), None


def _gathered_in_backward(dimension, dtype, to, _, gradient):
    return (lax.psum_scatter(gradient.astype(jnp.float32), "dp", scatter_dimension=dimension, tiled=True),)


_gathered_in.defvjp(_gathered_in_forward, _gathered_in_backward)


def _numbered(batch):
    """The rows of this shard with their numbers in the global batch; shard view."""
    rows = batch["tokens"].shape[0]
    return batch | {"examples": lax.axis_index("dp") * rows + jnp.arange(rows)}


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
    params = jax.tree.map(lambda p: p[0, 0], initialise(seed))
    return lora.added(params, config, jax.random.fold_in(jax.random.key(seed), LORA_STREAM))


class _ShardFunctions(NamedTuple):
    init: Callable
    logits: Callable
    loss: Callable
    prefill: Callable
    decode: Callable


def _shard_functions(config: Config, layer_parameters: Callable = lambda stored: stored) -> _ShardFunctions:
    """The shard module's methods as functions of its parameters."""

    def methods():
        shard = CausalTransformerShard(config, layer_parameters)
        return shard, (shard, shard.loss, shard.prefill, shard.decode)

    transformed = hk.multi_transform(methods)
    applies = [lambda params, *args, f=f: f(params, None, *args) for f in transformed.apply]
    return _ShardFunctions(transformed.init, *applies)
