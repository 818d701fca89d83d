"""Tokens to vectors, with the table split over the vocabulary."""

import dataclasses
import math
from collections.abc import Sequence

import haiku as hk
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config import Config
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import add_bias, add_broadcast, project, weight, zeros
from shardformer.shards.positions import POSITIONS


@dataclasses.dataclass
class EmbeddingShard(hk.Module):
    """The table's rows of this shard, and the vectors of positions if there are any."""

    config: Config
    name: str = "embed"

    def __call__(self, tokens_BT: Array, position_BT: Array, before: Sequence[Array] | None = None) -> Array:
        """Returns x_BTD, replicated over mp or split by tokens. `position_BT` may have one row; `before` lists ids."""
        x_BTD = self._lookup(tokens_BT, position_BT, before)
        if self.config.model.embed == "bias":
            x_BTD = add_bias(x_BTD, zeros("bias", self.config.model.d_model))
        return Norm(self.config)(x_BTD) if self.config.model.embed == "norm" else x_BTD

    def table(self) -> Array:
        """Returns this shard's rows; a tied head reads the same table."""
        c = self.config
        shape = [collectives.local(c.model.padded_vocab), c.model.table_size]
        return weight("tokens", shape, c.model.table_std)

    def _lookup(self, tokens_BT, position_BT, before):
        c, dtype = self.config, jnp.dtype(self.config.parallel.dtype)
        x_BTD = self.masked_lookup(tokens_BT, self.table())
        if before:
            from shardformer.shards.previous_tokens import look_up  # not imported without them

            x_BTD = x_BTD + look_up(self, before, position_BT)
        x_BTD = self._scale(collectives.reduce(x_BTD.astype(dtype), c.parallel.sequence_parallel))
        if c.model.table_size != c.model.d_model:
            x_BTD = project(x_BTD, c.model.d_model, c)
        if c.model.embeds_positions:
            positions_BTd = POSITIONS[c.model.positions](c, position_BT).astype(dtype)
            positions_BTD = collectives.gather_last(positions_BTd, c.parallel.sequence_parallel)
            x_BTD = add_broadcast(x_BTD, positions_BTD)
        return x_BTD

    def masked_lookup(self, tokens_BT: Array, table_vD: Array) -> Array:
        """Returns the rows of the tokens that this shard stores, else zeros; a sum over mp completes them."""
        row_BT = tokens_BT - collectives.offset(table_vD.shape[0])
        in_shard_BT = (row_BT >= 0) & (row_BT < table_vD.shape[0])
        x_BTD = table_vD[jnp.where(in_shard_BT, row_BT, 0)]
        return jnp.where(in_shard_BT[..., None], x_BTD, jnp.zeros_like(x_BTD))

    def _scale(self, x):
        """Multiplies by the factor of the embeddings, rounded to the compute dtype as transformers does for Gemma."""
        c = self.config.model
        factor = math.sqrt(c.d_model) if c.embed_scale is None else c.embed_scale
        return x if factor == 1 else x * jnp.asarray(factor, x.dtype)
