"""The complete model of one shard: embedding, the layers (one stacked set of parameters), projection."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config.names import PP, PREFIX, is_factor_of_product, is_stacked
from shardformer.kernels.attention import Attention, AttentionOptions, Cache, Plain
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.layout import Layout
from shardformer.layout.attention_limits import Rows
from shardformer.layout.choose_layers import Loop
from shardformer.shards.dropout import Dropout
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.layer import LayerInputs
from shardformer.shards.layer_features import choose_features, choose_layer, choose_mixed_layers, choose_records
from shardformer.shards.parameters import draw_only, unstack
from shardformer.shards.positions import RelativeBiasShard, choose_by_length, find_rotation, restart_positions
from shardformer.shards.projection import ProjectionShard


class CausalTransformerShard:
    """The Haiku modules as functions of one parameter tree, in which the leaves of the layers lead with L."""

    def __init__(self, layout: Layout):
        self.layout, self.config, self.replicas = layout, layout.config, layout.replicas
        c = self.config
        frequency = find_rotation(c) if c.model.rotates else None
        self._options = functools.partial(
            AttentionOptions, frequency=frequency, rotary_factor=c.model.rotary_factor, cap=c.model.attention_cap
        )
        self._stage_layers, self._features, self.records = c.stage_layers, choose_features(c), choose_records(layout)
        self._mixed, self._layer = choose_mixed_layers(c), choose_layer(c)
        self._previous: Any = None
        if c.model.previous_tokens:
            from shardformer.shards.previous_tokens import PreviousTokens  # not imported without them

            self._previous = PreviousTokens(c.model.previous_tokens)
        self._embed = transform(lambda *args: EmbeddingShard(c)(*args))
        self._table = transform(lambda: EmbeddingShard(c).table())
        self._relative_bias = transform(lambda *args: RelativeBiasShard(c)(*args))
        self._logits = transform(lambda *args: ProjectionShard(c, weights=layout.weights).logits(*args))
        self._hidden = transform(lambda x_BTD: ProjectionShard(c).hidden(x_BTD))
        self._token_loss = transform(lambda *args: ProjectionShard(c, layout.loss_chunk, layout.weights).loss(*args))

    def init(self, key: Array) -> dict:
        """Draws all parameters on axes of size 1, where a shard is the full model; each layer has a separate key."""
        c, position_T = self.config, jnp.arange(self.config.model.seq)

        def create():
            if c.model.biased_by_distance:
                RelativeBiasShard(c)(position_T, position_T)
            embed = EmbeddingShard(c)
            tokens_BT = jnp.zeros((1, c.model.seq), jnp.int32)
            x_BTD = embed(tokens_BT, position_T[None], self._find_before(Plain(), tokens_BT))
            options = self._options(position_T)

            def draw(sparse):
                return functools.partial(draw_only, lambda: self._layer(c, Plain(), sparse=sparse)(x_BTD, options))

            sparse = draw(self.records.feed_forward())
            layers = functools.partial(self._mixed.init, sparse, draw(None)) if self._mixed else jax.vmap(sparse)
            hk.transparent_lift(layers)(jax.random.split(hk.next_rng_key(), c.model.layers))
            ProjectionShard(c)(x_BTD, embed.table() if c.model.tied else None)

        return {f"{PREFIX}{module}": leaves for module, leaves in draw_only(create, key).items()}

    def logits(self, params: dict, tokens_BT: Array) -> Array:
        """Returns this shard's logits_BTv."""
        return self._project(*self._forward(params, tokens_BT)[:2])

    def loss(
        self,
        params: dict,
        tokens_BT: Array,
        targets_BT: Array,
        dropout: Dropout | None = None,
        documents_BT: Array | None = None,
        weights_BT: Array | None = None,
        counts: Any = None,
    ) -> tuple[Array, TokenLoss]:
        """Returns (the mean that training minimises, each token's loss); only the first may be differentiated.

        With `documents_BT`, a row has two or more documents; attention and positions stop where a document ends.
        `counts` are the counts of the global batch that `records` needs if these rows are only a part of it.
        """
        outside, x_BTD, records = self._forward(params, tokens_BT, dropout, documents_BT)
        objective, token = self._token_loss(outside, x_BTD, targets_BT, self._tied_table(outside), weights_BT)
        return self.records.complete(objective, records, counts), token

    def record(self, params: dict, tokens_BT: Array, dropout: Dropout | None, documents_BT: Array | None) -> Any:
        """Returns the records of the layers in a forward pass."""
        return self._forward(params, tokens_BT, dropout, documents_BT)[2]

    def prefill(self, params: dict, tokens_BS: Array, length: Array) -> tuple[Array, list[Cache]]:
        """Returns logits_Bv after the first `length` tokens, and the caches of the row; later tokens are padding."""
        outside, stacked = self._gather_outside(params)
        layout = self._layout_for(tokens_BS.shape[1])
        options = self._describe_rows(layout.attention, outside, tokens_BS.shape[1])
        if self.config.model.longest_short_row:
            options = choose_by_length(options, length, self.config)

        def layer(layer_type, x_BSD, inputs):
            stored, index = inputs
            return self._apply(layout, stored, index if layer_type is None else layer_type, x_BSD, options)[:2]

        before = self._find_before(layout.attention, tokens_BS)
        x_BSD = self._embed(outside, tokens_BS, options.position_T[None], before)
        x_BSD, caches = self._run_layers(_by_type(layer, layout.loop), layout.loop, stacked, x_BSD)
        if self._previous:
            caches = [*caches, self._previous.make_cache(tokens_BS)]
        last_B1D = layout.attention.take_token(x_BSD, length - 1)
        return self._project(outside, last_B1D)[:, 0], caches

    def decode(
        self, params: dict, token_B: Array, position: Array, caches: list[Cache], slot: Array
    ) -> tuple[Array, list[Cache]]:
        """Returns logits_Bv after one more token, at `position`, and the caches with the token in this slot.

        Each parameter of the layers is a list. Unrolled layers let XLA update the caches in place.
        """
        outside, x_B1D, caches = self._extend(params, token_B[:, None], position, caches, slot, None, position + 1)
        return self._project(outside, x_B1D)[:, 0], caches

    def extend(
        self, params: dict, token_BT: Array, position: Array, caches: list[Cache], count: Array, length: Array
    ) -> tuple[Array, list[Cache]]:
        """Returns logits_Bv after the first `count` of these tokens, and the caches with them; others are padding.

        `position`, also the first token's slot, counts the tokens before these. `length` counts all of the context.
        """
        outside, x_BTD, caches = self._extend(params, token_BT, position, caches, position, count, length)
        last_B1D = self.layout.attention.take_token(x_BTD, count - 1)
        return self._project(outside, last_B1D)[:, 0], caches

    def extend_with_logits(self, params, token_BT, position, caches, count, length) -> tuple[Array, list[Cache]]:
        """Returns logits_BTv after each of these tokens, and the caches with the first `count`, as `extend` does."""
        outside, x_BTD, caches = self._extend(params, token_BT, position, caches, position, count, length)
        return self._project(outside, self.layout.attention.join_rows(x_BTD)), caches

    def extend_with_hidden(self, params, token_BT, position, caches, count, length) -> tuple[Array, list[Cache]]:
        """Returns hidden_BTD, float32 and normed, of each of these tokens, and the caches, as `extend` does."""
        outside, x_BTD, caches = self._extend(params, token_BT, position, caches, position, count, length)
        return self._hidden(outside, self.layout.attention.join_rows(x_BTD)), caches

    def _extend(self, params, token_BT, position, caches, slot, count, length):
        """Returns the parameters outside the layers, x_BTD of the new tokens, and the caches with them.

        With a `count`, each shard has its tokens of the chunk; a single token is on all shards.
        """
        outside, per_layer = self._gather_outside(params)
        attention, L, before = self.layout.attention, self.config.stage_layers, None
        caches, ids = caches[:L], caches[L:]
        if self._previous:
            options = AttentionOptions(position, slot=slot, stored=count)
            before, *ids = self._previous.extend(attention, token_BT, options, *ids)
        if count is None:
            position_T = position + jnp.arange(1)
        else:  # padding may be behind the last position
            token_BT = attention.take_tokens(token_BT)
            position_T = position + attention.positions(token_BT.shape[1])
            position_T = jnp.minimum(position_T, self.config.model.seq - 1)
        bias = None
        if self.config.model.biased_by_distance:
            longest = max(cache.k_BhSK.shape[2] for cache in caches)
            bias = self._bias_by_distance(outside, attention.rows_of(longest))
        options = self._options(position_T, bias=bias, slot=slot, stored=count)
        if self.config.model.longest_short_row:
            options = choose_by_length(options, length, self.config)

        def layer(x_BTD, inputs):
            stored, cache, index = inputs
            return self._apply(self.layout, stored, index, x_BTD, options, cache=cache)[:2]

        x_BTD = self._embed(outside, token_BT, position_T[None], before)
        split = self._mixed.unstack if self._mixed else unstack
        x_BTD, caches = run_in_order([layer], split((per_layer, caches, list(range(L))), L), x_BTD)
        return outside, x_BTD, [*caches, *ids]

    def _forward(self, params, tokens_BT, dropout=None, documents_BT=None):
        """Returns the parameters outside the layers, x_BTD after all layers, and the records of the layers."""
        outside, stacked = self._gather_outside(params)
        layout, options, position_BT = self._lay_out_rows(outside, tokens_BT, dropout, documents_BT)
        x_BTD = self._embed(outside, tokens_BT, position_BT, self._find_before(layout.attention, tokens_BT))
        if dropout:
            x_BTD = dropout.at(0)(x_BTD)
        if layout.pipeline:
            return outside, *self._run_stages(layout, stacked, x_BTD, options, dropout)
        layers, remat = self._numbered_layers(layout, options, dropout), layout.remat
        wrap = None if remat.layer is None else remat.recompute_layer
        x_BTD, of_layers = self._run_layers(layers, layout.loop, stacked, x_BTD, wrap)
        return outside, x_BTD, self.records.stack(of_layers)

    def _find_before(self, attention, tokens_BT):
        return self._previous and self._previous.list_in_rows(attention, tokens_BT)

    def _lay_out_rows(self, outside, tokens_BT, dropout, documents_BT):
        """Returns the layout for these rows, their attention options, and the position of each token."""
        layout = self._layout_for(tokens_BT.shape[1], bool(dropout and dropout.rate), documents_BT is not None)
        options = self._describe_rows(layout.attention, outside, tokens_BT.shape[1])
        if documents_BT is None:
            return layout, options, options.position_T[None]
        position_BT = layout.attention.take_tokens(restart_positions(documents_BT))
        return layout, options._replace(documents_BT=documents_BT), position_BT

    def _layout_for(self, tokens: int, dropout: bool = False, documents: bool = False) -> Layout:
        """Returns the layout for these rows, of which each shard has `tokens` tokens."""
        rows = Rows(tokens, dropout, documents)
        return self.layout if rows == self.layout.rows else self.layout.for_rows(rows)

    def _gather_outside(self, params):
        """Returns the parameters outside the layers, gathered over dp, and those of the layers, as stored."""
        if self.config.parallel.sequence_parallel:
            params = _vary_late_parameters(params)
        stacked = {module: leaves for module, leaves in params.items() if is_stacked(module)}
        return _without_prefix(self.replicas.gather_outside(params)), stacked

    def _describe_rows(self, attention: Attention, outside, tokens: int) -> AttentionOptions:
        """Returns the attention options of full rows, which all layers share."""
        position_T, bias = attention.positions(tokens), None
        if self.config.model.biased_by_distance:
            if attention.bias_by_distance:
                bias = self._bias_by_distance(outside, attention.rows_of(tokens))
            else:
                bias = self._relative_bias(outside, position_T, position_T)
        options = self._options(position_T, bias=bias)
        if self.config.model.longest_short_row:
            return choose_by_length(options, attention.rows_of(tokens), self.config)
        return options

    def _bias_by_distance(self, outside, tokens: int):
        """Returns the bias_hS of each distance below `tokens`."""
        return self._relative_bias(outside, jnp.arange(tokens), jnp.arange(1))[0, :, :, 0]

    def _apply(self, layout, stored, layer, x_BTD, options: AttentionOptions, masks=None, cache=None):
        """Applies one layer of the model with its stored parameters; returns x_BTD, the layer's cache and its record.

        `masks` are the layer's dropout. `layer` is its number in the model, or that of its type if types are scanned.
        """
        inputs = LayerInputs(self.replicas.gather_layer(stored), options)
        for feature in self._features:
            inputs = feature.change(inputs, layer, masks)
        recompute = layout.remat.recompute_attention if layout.remat.attention else None

        def call(*args):
            method, products, branches = layout.attention, inputs.multiply, inputs.after_branch
            sparse = self.records.feed_forward(stored)
            result = self._layer(self.config, method, products, branches, recompute, sparse)(*args)
            return *result, sparse and sparse.routes

        return transform(call)(_without_prefix(inputs.params), x_BTD, inputs.options, cache)

    def _numbered_layers(self, layout, options, dropout: Dropout | None, first=0) -> list[Callable]:
        """Returns a layer of each type as a function of (x_BTD, (stored, index)) that gives its record, not its cache.

        Layer `first + index` of the model has separate dropout masks.
        """

        def layer(layer_type, x_BTD, inputs):
            stored, index = inputs
            masks = dropout and dropout.at(1 + first + index)
            number = first + index if layer_type is None else layer_type
            x_BTD, _, record = self._apply(layout, stored, number, x_BTD, options, masks)
            return x_BTD, record

        return _by_type(layer, layout.loop)

    def _run_layers(self, layers: list[Callable], loop: Loop, stacked, x_BTD, wrap: Callable | None = None):
        """Runs the layers of this stage (all, without stages); returns x_BTD and the outputs."""
        L = self._stage_layers
        inputs = stacked, jnp.arange(L) if loop.scan else list(range(L))  # unrolled, the compiler knows the indices
        run = self._mixed.run if self._mixed else run_layers
        return run(layers, inputs, x_BTD, L, loop, wrap)

    def _run_stages(self, layout, stacked, x_BTD, options: AttentionOptions, dropout: Dropout | None):
        """Runs the layers as pipeline stages; a backward pass that recomputes does so for a stage at a time."""
        from shardformer.parallel import pipeline  # not imported without stages

        c, schedule = self.config, layout.pipeline
        layers_of = pipeline.distribute(stacked, schedule.rounds)

        def stage(rows, round_):
            x_bTD, example_b, documents_bT, records = rows
            masks = dropout and dropout._replace(example_B=example_b)
            first = (round_ * schedule.pp + lax.axis_index(PP)) * c.stage_layers
            layers = self._numbered_layers(layout, options._replace(documents_BT=documents_bT), masks, first)
            x_bTD, of_layers = self._run_layers(layers, layout.loop, layers_of(round_), x_bTD)
            return x_bTD, example_b, documents_bT, self.records.add(records, of_layers, first)

        rows = x_BTD, dropout and dropout.example_B, options.documents_BT, self.records.start(x_BTD)
        stage = layout.remat.recompute_layer(stage, in_loop=True)
        x_BTD, _, _, records = pipeline.run_stages(stage, rows, schedule)
        return x_BTD, records

    def _project(self, outside, x_BTD):
        return self._logits(outside, x_BTD, self._tied_table(outside))

    def _tied_table(self, outside):
        return self._table(outside) if self.config.model.tied else None


def run_layers(
    layers: list[Callable], inputs, x: Array, count: int, loop: Loop, wrap: Callable | None = None
) -> tuple[Array, list]:
    """Runs `layer(x, input) -> (x, output)` on each of `count` inputs, scanned or not; returns x and the outputs.

    Layer i is `layers[i % len(layers)]`. `wrap(layer, in_loop=...)` changes the backward pass of a layer.
    """
    if loop.scan and loop.types > 1:
        from shardformer.shards import layer_groups  # not imported if all layers are of one type

        return layer_groups.scan_groups(layers, inputs, x, count, wrap)
    layers = [wrap(layer, in_loop=loop.scan) for layer in layers] if wrap else layers
    if not loop.scan:
        return run_in_order(layers, unstack(inputs, count), x)
    x, outputs = lax.scan(layers[0], x, inputs)
    return x, unstack(outputs, count)


def run_in_order(layers: Sequence[Callable], inputs: list, x) -> tuple[Array, list]:
    """Runs `layer(x, input) -> (x, output)` on each input; layer i is `layers[i % len(layers)]`."""
    outputs: list = []
    for i, each in enumerate(inputs):
        x, output = layers[i % len(layers)](x, each)
        outputs.append(output)
    return x, outputs


def _by_type(layer: Callable, loop: Loop) -> list[Callable]:
    """Returns the layer of each type; a single type has no number."""
    numbers = range(loop.types) if loop.types > 1 else [None]
    return [functools.partial(layer, number) for number in numbers]


def transform(module_call: Callable) -> Callable:
    """Returns a Haiku module's call as a function of parameters and arguments."""
    transformed: Any = hk.without_apply_rng(hk.transform(module_call))
    return transformed.apply


def _vary_late_parameters(params: dict) -> dict:
    """Marks norms, late biases and `project` as varying over mp: each shard of the model applies them to its tokens."""

    def mark(name, p):
        return p if is_factor_of_product(name) and name != "project" else collectives.vary_over_mp(p)

    return {module: {name: mark(name, p) for name, p in leaves.items()} for module, leaves in params.items()}


def _without_prefix(params: dict) -> dict:
    return {module.removeprefix(PREFIX): leaves for module, leaves in params.items()}
