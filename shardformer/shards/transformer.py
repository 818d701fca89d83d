"""The complete model of one shard: embedding, the layers (one stacked set of parameters), projection."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.config.names import PP, PREFIX, is_stacked
from shardformer.context import zigzag
from shardformer.kernels import pipeline_schedule
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.kernels.layer_loop import run_layers
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.shards import axes
from shardformer.shards.attention import AttentionContext, Cache, choose_method
from shardformer.shards.data_parallel import DataParallel
from shardformer.shards.dropout import Dropout
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.parameters import is_factor_of_product
from shardformer.shards.positions import RelativeBiasShard, restart_positions
from shardformer.shards.projection import ProjectionShard
from shardformer.shards.remat import recompute_layer
from shardformer.shards.shared_heads import take_own_head


class CausalTransformerShard:
    """The Haiku modules as functions of one parameter tree, in which the leaves of the layers lead with L."""

    def __init__(self, config: Config, data_parallel: DataParallel, hardware: Hardware = CPU):
        self.config, self.data_parallel, self.hardware = config, data_parallel, hardware
        self._embed = _function(lambda *args: EmbeddingShard(config)(*args))
        self._table = _function(lambda: EmbeddingShard(config).table())
        self._relative_bias = _function(lambda *args: RelativeBiasShard(config)(*args))
        self._layer = _function(lambda *args: TransformerLayerShard(config)(*args))
        self._logits = _function(lambda *args: ProjectionShard(config).logits(*args))
        self._token_loss = _function(lambda *args: ProjectionShard(config, hardware.platform).loss(*args))

    def init(self, key: Array) -> dict:
        """Draws all parameters on axes of size 1, where a shard is the full model; each layer has its own key."""
        c, position_T = self.config, jnp.arange(self.config.seq)

        def create():
            if c.positions == "t5":
                RelativeBiasShard(c)(position_T, position_T)
            embed = EmbeddingShard(c)
            x_BTD = embed(jnp.zeros((1, c.seq), jnp.int32), position_T[None])
            context = AttentionContext(position_T).at_layer(c, 0)
            layer = hk.transform(lambda: TransformerLayerShard(c)(x_BTD, context))
            hk.transparent_lift(jax.vmap(layer.init))(jax.random.split(hk.next_rng_key(), c.layers))
            ProjectionShard(c)(x_BTD, embed.table() if c.tied else None)

        params: Any = hk.transform(create).init(key)  # mypy cannot resolve Haiku's names of its types
        return {f"{PREFIX}{module}": leaves for module, leaves in params.items()}

    def logits(self, params: dict, tokens_BT: Array) -> Array:
        """Returns this shard's logits_BTv."""
        return self._project(*self._forward(params, tokens_BT))

    def loss(
        self,
        params: dict,
        tokens_BT: Array,
        targets_BT: Array,
        dropout: Dropout | None = None,
        documents_BT: Array | None = None,
        weights_BT: Array | None = None,
    ) -> tuple[Array, TokenLoss]:
        """Returns (the mean that training minimises, each token's loss); only the first may be differentiated.

        With `documents_BT`, a row holds several texts; attention and positions stop where a text ends.
        """
        outside, x_BTD = self._forward(params, tokens_BT, dropout, documents_BT)
        return self._token_loss(outside, x_BTD, targets_BT, self._tied_table(outside), weights_BT)

    def prefill(self, params: dict, tokens_BS: Array, length: Array) -> tuple[Array, list[Cache]]:
        """Returns logits_Bv after the first `length` tokens, and each layer's cache; later tokens are padding."""
        outside, stacked = self._gather_outside(params)
        context = self._describe_sequence(outside, tokens_BS.shape[1])

        def layer(context, x_BSD, inputs):
            stored, index = inputs
            return self._apply(stored, index, x_BSD, context)

        x_BSD = self._embed(outside, tokens_BS, context.query_T[None])
        kinds = [functools.partial(layer, each) for each in context.by_kind()]
        x_BSD, caches = self._run_numbered(kinds, stacked, x_BSD)
        last_B1D = zigzag.take_token(x_BSD, length - 1, self.config.cp)
        return self._project(outside, last_B1D)[:, 0], caches

    def decode(
        self, params: dict, token_B: Array, position: Array, caches: list[Cache], slot: Array
    ) -> tuple[Array, list[Cache]]:
        """Returns logits_Bv after one more token, at `position`, and the caches with the token in this slot.

        Each parameter of the layers is a list. Unrolled layers let XLA update the caches in place.
        """
        outside, per_layer = self._gather_outside(params)
        query_T = position + jnp.arange(1)
        cp, longest = self.config.cp, max(cache.k_BhSK.shape[2] for cache in caches)
        context = AttentionContext(query_T, self._bias_by_distance(outside, longest * cp), slot=slot, cp=cp)

        def layer(x_B1D, inputs):
            stored, cache, index = inputs
            return self._apply(stored, index, x_B1D, context, cache=cache)

        x_B1D = self._embed(outside, token_B[:, None], query_T[None])
        inputs = per_layer, caches, self._indices(scan=False)
        x_B1D, caches = run_layers([layer], inputs, x_B1D, self.config.stage_layers, scan=False)
        return self._project(outside, x_B1D)[:, 0], caches

    def _forward(self, params, tokens_BT, dropout=None, documents_BT=None):
        """Returns the parameters outside the layers, and x_BTD after all layers."""
        outside, stacked = self._gather_outside(params)
        context = self._describe_sequence(outside, tokens_BT.shape[1], dropout, documents_BT)
        position_BT = context.query_T[None]
        if documents_BT is not None:
            position_BT = zigzag.take_own(restart_positions(documents_BT), self.config.cp)
        x_BTD = self._embed(outside, tokens_BT, position_BT)
        if dropout:
            x_BTD = dropout.at(0)(x_BTD)
        if self.config.pp > 1:
            return outside, self._run_stages(stacked, x_BTD, context, dropout)
        wrap = functools.partial(recompute_layer, config=self.config)
        return outside, self._run_numbered(self._numbered_layers(context, dropout), stacked, x_BTD, wrap)[0]

    def _gather_outside(self, params):
        """Returns the parameters outside the layers, unsharded over dp, and the stored ones of the layers."""
        if self.config.sequence_parallel:
            params = _applied_to_own_tokens(params)
        stacked = {module: leaves for module, leaves in params.items() if is_stacked(module)}
        return _without_prefix(self.data_parallel.gather_once(params)), stacked

    def _describe_sequence(self, outside, tokens: int, dropout=None, documents_BT=None) -> AttentionContext:
        """Returns the attention context of sequences that attend to their own tokens."""
        c, position_T = self.config, zigzag.own_positions(tokens * self.config.cp, self.config.cp)
        method = choose_method(c, self.hardware, tokens, bool(dropout and dropout.rate), documents_BT is not None)
        bias = self._bias_by_distance(outside, tokens * c.cp) if method.block else None
        if c.biased_by_distance and not method.block:
            bias = self._relative_bias(outside, position_T, position_T)
        return AttentionContext(position_T, bias, documents_BT, method)

    def _bias_by_distance(self, outside, tokens: int):
        """Returns the bias_hS of each distance below `tokens`; None for other kinds of positions."""
        if not self.config.biased_by_distance:
            return None
        return self._relative_bias(outside, jnp.arange(tokens), jnp.arange(1))[0, :, :, 0]

    def _apply(self, stored, index, x_BTD, context, dropout=None, cache=None):
        """Applies layer `index` of the model with its stored parameters; returns x_BTD and the layer's cache."""
        own = take_own_head(self.data_parallel.gather_layer(stored), self.config)
        return self._layer(_without_prefix(own), x_BTD, context.at_layer(self.config, index), dropout, cache)

    def _numbered_layers(self, context: AttentionContext, dropout: Dropout | None, first=0) -> Sequence[Callable]:
        """Returns a layer of each kind as a function of (x_BTD, (stored, index)) that keeps no cache.

        Layer `first + index` of the model has its own dropout masks.
        """

        def layer(context, x_BTD, inputs):
            stored, index = inputs
            masks = dropout and dropout.at(1 + first + index)
            return self._apply(stored, first + index, x_BTD, context, masks)[0], None

        return [functools.partial(layer, each) for each in context.by_kind()]

    def _run_numbered(self, kinds: Sequence[Callable], stacked, x_BTD, *wrap: Callable) -> tuple[Array, list]:
        """Runs the layers of this stage (all, without stages); returns x_BTD and the outputs."""
        scan = self.config.scan
        return run_layers(kinds, (stacked, self._indices(scan)), x_BTD, self.config.stage_layers, scan, *wrap)

    def _indices(self, scan: bool):
        """Returns the numbers of this stage's layers; numbers of unrolled layers are known to the compiler."""
        L = self.config.stage_layers
        return jnp.arange(L) if scan else list(range(L))

    def _run_stages(self, stacked, x_BTD, context: AttentionContext, dropout: Dropout | None):
        """Runs the layers as pipeline stages; a backward pass that recomputes does so for a stage at a time."""
        c, pp = self.config, self.config.pp
        layers_of = pipeline_schedule.deal(stacked, c.pipeline_rounds)

        def stage(rows, turn):
            x_bTD, example_b, documents_bT = rows
            context_here = context._replace(documents_BT=documents_bT)
            masks = dropout and dropout._replace(example_B=example_b)
            first = (turn * pp + lax.axis_index(PP)) * c.stage_layers
            kinds = self._numbered_layers(context_here, masks, first)
            return self._run_numbered(kinds, layers_of(turn), x_bTD)[0], example_b, documents_bT

        rows = x_BTD, dropout and dropout.example_B, context.documents_BT
        stage = recompute_layer(stage, c, in_loop=True)
        return pipeline_schedule.run_stages(stage, rows, c.accum // pp, c.pipeline_rounds)[0]

    def _project(self, outside, x_BTD):
        return self._logits(outside, x_BTD, self._tied_table(outside))

    def _tied_table(self, outside):
        return self._table(outside) if self.config.tied else None


def _function(module_call: Callable) -> Callable:
    """Returns a Haiku module's call as a function of parameters and arguments."""
    transformed: Any = hk.without_apply_rng(hk.transform(module_call))
    return transformed.apply


def _applied_to_own_tokens(params: dict) -> dict:
    """Marks norms and late biases as varying over mp: each shard of the model applies them to its own tokens."""
    return {
        module: {name: p if is_factor_of_product(name) else axes.vary(p) for name, p in leaves.items()}
        for module, leaves in params.items()
    }


def _without_prefix(params: dict) -> dict:
    return {module.removeprefix(PREFIX): leaves for module, leaves in params.items()}
