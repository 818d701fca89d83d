"""Vectors to logits, split over the vocabulary, and the loss of each token without ever gathering the logits."""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import MP
from shardformer.kernels import vocabulary_loss
from shardformer.kernels.vocabulary_loss import TokenLoss, Vocabulary
from shardformer.layout.float_weights import FLOAT, FloatWeights
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import project, weight, zeros


@dataclasses.dataclass
class ProjectionShard(hk.Module):
    """The last norm and this shard's part of the output head."""

    config: Config
    chunk: int | None = None  # tokens whose logits exist together; None: all
    weights: FloatWeights = FLOAT  # how the table is stored
    name: str = "head"

    def __call__(self, x_BTD: Array, tied_table_vD: Array | None = None) -> tuple:
        """Returns the factors of the logits: normed activations, this shard's table and bias, and its vocabulary."""
        c, tied = self.config, tied_table_vD is not None
        h_BTD = self._scale(self._norm(x_BTD))  # the logits are linear in it, and far more numbers
        if c.model.table_size != c.model.d_model:
            h_BTD = project(h_BTD, c.model.table_size, c)
        h_BTD = collectives.fan_out(h_BTD, c.parallel.sequence_parallel)
        v, table, bias_v = collectives.local(c.model.padded_vocab), tied_table_vD, None
        if not tied:
            table = weight("w", [c.model.table_size, v], c.model.table_std)
        if not tied and "head" in c.model.biased and c.model.head_bias:
            bias_v = self._scale(zeros("bias", v))
        multiply = self.weights.multiply_table
        return h_BTD, table, bias_v, Vocabulary(c.model.vocab, MP, tied, c.model.logits_cap, multiply)

    def _scale(self, x: Array) -> Array:
        scale = self.config.model.head_scale
        return x if scale == 1 else x * scale

    @hk.name_like("__call__")  # else Haiku adds this method's name to the norm's path
    def _norm(self, x_BTD: Array) -> Array:
        """Returns the last norm of activations, unless the layers normed them."""
        return x_BTD if self.config.model.sum_norms else Norm(self.config)(x_BTD)

    @hk.name_like("__call__")
    def hidden(self, x_BTD: Array) -> Array:
        """Returns the last norm of activations, in float32."""
        return self._norm(x_BTD).astype(jnp.float32)

    def logits(self, x_BTD: Array, tied_table_vD: Array | None = None) -> Array:
        """Returns this shard's logits_BTv in float32; padded entries are -inf."""
        return vocabulary_loss.project(*self(x_BTD, tied_table_vD))

    def loss(
        self, x_BTD: Array, targets_BT: Array, tied_table_vD: Array | None = None, weights_BT: Array | None = None
    ) -> tuple[Array, TokenLoss]:
        """Returns (the mean that training minimises, each token's loss); only the first may be differentiated.

        The logits of more tokens than `chunk` are computed for some tokens at a time.
        """
        h_BTD, table, bias_v, vocabulary = self(x_BTD, tied_table_vD)
        weights_BT = jnp.ones(targets_BT.shape, jnp.float32) if weights_BT is None else weights_BT
        weights_BT = weights_BT / targets_BT.size
        if self.chunk and targets_BT.size > self.chunk:
            return self.weights.loss_in_chunks(
                h_BTD, table, bias_v, targets_BT, weights_BT, vocabulary, self.config.training.z_loss, self.chunk
            )
        logits_BTv = vocabulary_loss.project(h_BTD, table, bias_v, vocabulary)
        token = vocabulary_loss.measure_tokens(logits_BTv, targets_BT, vocabulary)
        return vocabulary_loss.objective(token, weights_BT, self.config.training.z_loss), token
