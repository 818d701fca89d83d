"""The model of one shard with a differentiable loss of every token, or with the factors of its logits.

For objectives that are no mean of the losses of tokens.
"""

from typing import Any

from jax import Array

from shardformer.kernels import vocabulary_loss
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.shards.dropout import Dropout
from shardformer.shards.projection import ProjectionShard
from shardformer.shards.transformer import CausalTransformerShard, transform


class PairTransformerShard(CausalTransformerShard):
    """`CausalTransformerShard` with `token_losses`."""

    def __init__(self, layout):
        super().__init__(layout)
        c, weights = self.config, layout.weights

        def token_losses(x_BTD, targets_BT, table):
            factors = ProjectionShard(c, weights=weights)(x_BTD, table)
            return measure(*factors, targets_BT, layout.loss_chunk)

        self._token_losses = transform(token_losses)
        self._factors = transform(lambda x_BTD, table: ProjectionShard(c, weights=weights)(x_BTD, table))

    def factors(
        self, params: dict, tokens_BT: Array, dropout: Dropout | None, documents_BT: Array | None
    ) -> tuple[tuple, Any]:
        """Returns the factors of the logits, and the records of the layers.

        The factors are activations, this shard's table and bias, and its vocabulary.
        """
        outside, x_BTD, records = self._forward(params, tokens_BT, dropout, documents_BT)
        return self._factors(outside, x_BTD, self._tied_table(outside)), records

    def token_losses(
        self,
        params: dict,
        tokens_BT: Array,
        targets_BT: Array,
        dropout: Dropout | None = None,
        documents_BT: Array | None = None,
        constants: Any = None,
    ) -> tuple[TokenLoss, Array]:
        """Returns the losses of every token, which may be differentiated, and the objective of the layers' records."""
        outside, x_BTD, records = self._forward(params, tokens_BT, dropout, documents_BT)
        token = self._token_losses(outside, x_BTD, targets_BT, self._tied_table(outside))
        return token, self.records.complete(0 * token.nats_BT.sum(), records, constants)


def measure(h_BTD, table, bias_v, vocabulary, targets_BT, chunk: int | None) -> TokenLoss:
    """Returns the losses of every token, which may be differentiated.

    The weights of the tokens are known only when all of them are measured, so `loss_in_chunks` has no use here.
    """
    if chunk and targets_BT.size > chunk:
        return vocabulary_loss.measure_in_chunks(h_BTD, table, bias_v, targets_BT, vocabulary, chunk)
    logits_BTv = vocabulary_loss.project(h_BTD, table, bias_v, vocabulary)
    return vocabulary_loss.measure_tokens(logits_BTv, targets_BT, vocabulary)
