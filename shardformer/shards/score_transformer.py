"""The model of one shard with a number for each token, in place of logits."""

from typing import Any

import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config.names import MP
from shardformer.shards.dropout import Dropout
from shardformer.shards.transformer import CausalTransformerShard

SCORE = "score"  # the module of the head [D, 1]


class ScoreTransformerShard(CausalTransformerShard):
    """`CausalTransformerShard` with `scores`."""

    def scores(
        self,
        params: dict,
        tokens_BT: Array,
        dropout: Dropout | None = None,
        documents_BT: Array | None = None,
        constants: Any = None,
    ) -> tuple[Array, Array]:
        """Returns score_BT of this shard's tokens, in float32, and the objective of the layers' records."""
        outside, x_BTD, records = self._forward(params, tokens_BT, dropout, documents_BT)
        score_BT = jnp.einsum("btd,do->bt", self._hidden(outside, x_BTD), outside[SCORE]["w"])
        if self.config.parallel.sequence_parallel:  # x_BTD has a part of the tokens on each shard of the model
            score_BT = collectives.pmean(collectives.fan_out(score_BT, tokens_split=True), MP)
        return score_BT, self.records.complete(0 * score_BT.sum(), records, constants)
