"""The whole model of one shard: embedding, the layers (one stacked set of parameters), projection."""

import dataclasses
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.shards.dropout import Dropout
from shardformer.shards.embedding import EmbeddingShard
from shardformer.shards.layer import Attending, Cache, TransformerLayerShard
from shardformer.shards.positions import RelativeBiasShard
from shardformer.shards.projection import ProjectionShard, TokenLoss


@dataclasses.dataclass
class CausalTransformerShard(hk.Module):
    config: Config
    layer_parameters: Callable = lambda stored: stored  # what one layer computes with, of what is stored for it
    name: str = "transformer"

    def __call__(self, tokens_BT):
        """This shard's logits_BTv."""
        x_BTD, tied_table, _ = self._trunk(tokens_BT)
        return ProjectionShard(self.config)(x_BTD, tied_table)

    @hk.name_like("__call__")
    def loss(self, tokens_BT, targets_BT, dropout: Dropout | None = None) -> TokenLoss:
        x_BTD, tied_table, _ = self._trunk(tokens_BT, dropout)
        return ProjectionShard(self.config).loss(x_BTD, targets_BT, tied_table)

    @hk.name_like("__call__")
    def prefill(self, tokens_BS, length):
        """Logits_Bv after the first `length` tokens, and the cache (of [L, B, S, h, K]); what follows is padding."""
        x_BSD, tied_table, cache = self._trunk(tokens_BS, keep_cache=True)
        last_B1D = lax.dynamic_slice_in_dim(x_BSD, length - 1, 1, axis=1)
        return ProjectionShard(self.config)(last_B1D, tied_table)[:, 0], cache

    @hk.name_like("__call__")
    def decode(self, token_B, position, cache: Cache):
        """Logits_Bv after one more token, which stands at `position`, and the cache with it."""
        x_B1D, tied_table, cache = self._trunk(token_B[:, None], cache=cache, first=position, keep_cache=True)
        return ProjectionShard(self.config)(x_B1D, tied_table)[:, 0], cache

    @hk.name_like("__call__")
    def _trunk(self, tokens_BT, dropout=None, cache=None, first=0, keep_cache=False):
        """x_BTD after all layers, the embedding's table if the head is tied to it, and the cache if it is kept."""
        query_T = first + jnp.arange(tokens_BT.shape[1])
        key_S = query_T if cache is None else jnp.arange(cache.k_BShK.shape[2])  # a stacked cache: [L, B, S, h, K]
        bias_1hTS = RelativeBiasShard(self.config)(query_T, key_S) if self.config.positions == "t5" else None
        embed = EmbeddingShard(self.config)
        x_BTD = embed(tokens_BT, query_T)
        if dropout:
            x_BTD = dropout.at(0)(x_BTD)
        x_BTD, cache = self._layers(x_BTD, Attending(query_T, key_S, bias_1hTS), dropout, cache, keep_cache)
        return x_BTD, embed.table() if self.config.tied else None, cache

    @hk.name_like("__call__")
    def _layers(self, x_BTD, attending, dropout, cache, keep_cache):
        """All layers in turn. Their parameters are stacked on a leading L, scanned or not."""
        L = self.config.layers
        layer = hk.without_apply_rng(hk.transform(lambda *args: TransformerLayerShard(self.config)(*args)))

        def initialise(key, x_BTD):
            return jax.vmap(lambda key: layer.init(key, x_BTD, attending))(jax.random.split(key, L))

        lifted = hk.transparent_lift(initialise)(hk.maybe_next_rng_key(), x_BTD)
        # Once initialised, a transparent lift hands back everything in this module's scope: the embedding as well.
        stacked = {module: leaves for module, leaves in lifted.items() if module.startswith("layers")}

        def apply(x_BTD, inputs):
            stored, index, cache = inputs
            parameters = self.layer_parameters(stored)
            x_BTD, cache = layer.apply(parameters, x_BTD, attending, dropout and dropout.at(1 + index), cache)
            return x_BTD, cache if keep_cache else None

        if self.config.remat:
            apply = jax.checkpoint(apply)
        elif self.config.zero == 3:
            apply = jax.checkpoint(apply, policy=_sees_activations)
        if self.config.scan:
            return lax.scan(apply, x_BTD, (stacked, jnp.arange(L), cache))
        caches = []
        for inputs in zip(_unstack(stacked, L), range(L), _unstack(cache, L), strict=True):
            x_BTD, kept = apply(x_BTD, inputs)
            caches.append(kept)
        return x_BTD, jax.tree.map(lambda *layers: jnp.stack(layers), *caches)


def _sees_activations(_, *operands, **__) -> bool:
    """Of an operation in a layer: what it makes of parameters alone, gathered matrices first, has at most two axes.

    Kept for the backward pass, these would be the whole model on every device. (Where layers are unrolled, XLA's CPU
    keeps them all the same: it drops the barriers of `jax.checkpoint`, of remat too.)
    """
    return any(operand.ndim > 2 for operand in operands)


def _unstack(tree, count: int) -> list:
    """The leading axis as a list of trees. lax.split, so that the gradients are joined by one concatenation."""
    leaves, treedef = jax.tree.flatten(tree)
    columns = [[part[0] for part in lax.split(leaf, (1,) * count)] for leaf in leaves]
    return [treedef.unflatten([column[i] for column in columns]) for i in range(count)]
