"""The whole model of one shard: embedding, the layers (one stacked set of parameters), projection."""

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.config.names import PREFIX
from shardformer.kernels import pipeline_schedule
from shardformer.kernels.fused_attention import CPU, Hardware
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.shards import axes
from shardformer.shards.attention import AttentionPositions, Cache, Method, choose_method
from shardformer.shards.dropout import Dropout
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.parameters import is_factor_of_product, is_stacked
from shardformer.shards.positions import RelativeBiasShard, restart_positions
from shardformer.shards.projection import ProjectionShard
from shardformer.shards.remat import recompute_layer
from shardformer.shards.zero import Zero


class CausalTransformerShard:
    """The Haiku modules as functions of one parameter tree, in which those of the layers lead with L."""

    def __init__(self, config: Config, zero: Zero, hardware: Hardware = CPU):
        self.config, self.zero, self.hardware = config, zero, hardware
        self._embed = _function(lambda *args: EmbeddingShard(config)(*args))
        self._table = _function(lambda: EmbeddingShard(config).table())
        self._relative_bias = _function(lambda *args: RelativeBiasShard(config)(*args))
        self._layer = _function(lambda *args: TransformerLayerShard(config)(*args))
        self._logits = _function(lambda *args: ProjectionShard(config).logits(*args))
        self._token_loss = _function(lambda *args: ProjectionShard(config).loss(*args))

    def init(self, key):
        """All parameters, on axes of size 1, where a shard is the whole model; each layer has a key of its own."""
        c, position_T = self.config, jnp.arange(self.config.seq)

        def create():
            if c.positions == "t5":
                RelativeBiasShard(c)(position_T, position_T)
            embed = EmbeddingShard(c)
            x_BTD = embed(jnp.zeros((1, c.seq), jnp.int32), position_T[None])
            layer = hk.transform(lambda: TransformerLayerShard(c)(x_BTD, AttentionPositions(position_T, position_T)))
            hk.transparent_lift(jax.vmap(layer.init))(jax.random.split(hk.next_rng_key(), c.layers))
            ProjectionShard(c)(x_BTD, embed.table() if c.tied else None)

        params = hk.transform(create).init(key)
        return {f"{PREFIX}{module}": leaves for module, leaves in params.items()}

    def logits(self, params, tokens_BT):
        """This shard's logits_BTv."""
        once, x_BTD, _ = self._trunk(params, tokens_BT)
        return self._project(once, x_BTD)

    def loss(
        self, params, tokens_BT, targets_BT, dropout: Dropout | None = None, documents_BT=None, weights_BT=None
    ) -> tuple[jax.Array, TokenLoss]:
        """(the mean of what is minimised, each token's loss); only the first may be differentiated.

        With `documents_BT`, a row is several texts, and attention and positions stop where one ends.
        """
        once, x_BTD, _ = self._trunk(params, tokens_BT, dropout, documents_BT=documents_BT)
        return self._token_loss(once, x_BTD, targets_BT, self._tied_table(once), weights_BT)

    def prefill(self, params, tokens_BS, length):
        """Logits_Bv after the first `length` tokens, and each layer's cache; what follows is padding."""
        once, x_BSD, caches = self._trunk(params, tokens_BS, keep_cache=True)
        last_B1D = lax.dynamic_slice_in_dim(x_BSD, length - 1, 1, axis=1)
        return self._project(once, last_B1D)[:, 0], caches

    def decode(self, params, token_B, position, caches: list[Cache], slot):
        """Logits_Bv after one more token, which stands at `position`, and the caches with it in this slot.

        A parameter of the layers is a list of theirs.
        """
        once, x_B1D, caches = self._trunk(params, token_B[:, None], None, caches, position, slot, keep_cache=True)
        return self._project(once, x_B1D)[:, 0], caches

    def _project(self, once, x_BTD):
        return self._logits(once, x_BTD, self._tied_table(once))

    def _tied_table(self, once):
        return self._table(once) if self.config.tied else None

    def _trunk(
        self, params, tokens_BT, dropout=None, caches=None, first=0, slot=None, keep_cache=False, documents_BT=None
    ):
        """The parameters outside the layers, x_BTD after all layers, and the caches if they are kept."""
        c = self.config
        if c.sequence_parallel:
            params = _applied_to_own_tokens(params)
        once = _without_prefix(self.zero.gather_once(params))
        query_T = first + jnp.arange(tokens_BT.shape[1])
        key_S = query_T if caches is None else first - slot + jnp.arange(caches[0].k_BhSK.shape[2])
        options = dropout is not None, documents_BT is not None
        method = Method() if caches else choose_method(c, self.hardware, tokens_BT.shape[1], *options)
        bias = None
        if c.positions == "t5":
            bias = self._relative_bias(once, query_T, key_S[:1] if method.block else key_S)
            bias = bias[0, :, :, 0] if method.block else bias
        position_BT = query_T[None] if documents_BT is None else restart_positions(documents_BT)
        x_BTD = self._embed(once, tokens_BT, position_BT)
        if dropout:
            x_BTD = dropout.at(0)(x_BTD)
        stacked = {module: leaves for module, leaves in params.items() if is_stacked(module)}
        positions = AttentionPositions(query_T, key_S, bias, documents_BT, method, slot)
        if c.pp > 1:
            return once, self._stages(stacked, x_BTD, positions, dropout), None
        return once, *self._layers(stacked, x_BTD, positions, dropout, caches, keep_cache)

    def _stages(self, stacked, x_BTD, positions, dropout):
        """All layers, a part of them on each stage; what is to be computed again is so for a stage as a whole."""
        c, pp = self.config, self.config.pp
        layers_of = pipeline_schedule.deal(stacked, c.pipeline_rounds)

        def stage(rows, turn):
            x_bTD, example_b, documents_bT = rows
            mine = positions._replace(documents_BT=documents_bT)
            masks = dropout and dropout._replace(example_B=example_b)
            first = (turn * pp + lax.axis_index(pipeline_schedule.PP)) * c.stage_layers
            return self._layers(layers_of(turn), x_bTD, mine, masks, first=first)[0], example_b, documents_bT

        rows = x_BTD, dropout and dropout.example_B, positions.documents_BT
        return pipeline_schedule.run_stages(recompute_layer(stage, c), rows, c.accum // pp, c.pipeline_rounds)[0]

    def _layers(self, stacked, x_BTD, positions, dropout, caches=None, keep_cache=False, first=0):
        """These layers in turn, from number `first`, scanned or not: a new token is not, so that its caches are changed
        in place.
        """

        def apply(x_BTD, inputs):
            stored, index, cache = inputs
            parameters = _without_prefix(self.zero.gather_layer(stored))
            x_BTD, cache = self._layer(parameters, x_BTD, positions, dropout and dropout.at(1 + first + index), cache)
            return x_BTD, cache if keep_cache else None

        apply = apply if self.config.pp > 1 else recompute_layer(apply, self.config)
        L = self.config.stage_layers
        if self.config.scan and caches is None:
            x_BTD, kept = lax.scan(apply, x_BTD, (stacked, jnp.arange(L), None))
            return x_BTD, _unstack(kept, L)
        kept = []
        for inputs in zip(_unstack(stacked, L), range(L), caches or [None] * L, strict=True):
            x_BTD, cache = apply(x_BTD, inputs)
            kept.append(cache)
        return x_BTD, kept


def _function(module_call):
    """A Haiku module's call as a function of parameters and arguments."""
    return hk.without_apply_rng(hk.transform(module_call)).apply


def _applied_to_own_tokens(params):
    """Norms and the biases after a sum, as each shard of the model applies them to other tokens."""
    vary = lambda name, p: p if is_factor_of_product(name) else axes.vary(p)
    return {module: {name: vary(name, p) for name, p in leaves.items()} for module, leaves in params.items()}


def _without_prefix(params):
    return {module.removeprefix(PREFIX): leaves for module, leaves in params.items()}


def _unstack(tree, count: int) -> list:
    """The leading axis, or the lists that are there instead, as a list of trees.

    lax.split, so that the gradients are joined by one concatenation.
    """
    is_apart = lambda leaf: isinstance(leaf, list)
    leaves, treedef = jax.tree.flatten(tree, is_leaf=is_apart)
    columns = [x if is_apart(x) else [part[0] for part in lax.split(x, (1,) * count)] for x in leaves]
    return [treedef.unflatten([column[i] for column in columns]) for i in range(count)]
