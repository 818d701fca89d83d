"""The model of one shard with one more layer, which predicts the token after the next (DeepSeek-V3, section 2.2).

The layer reads W [norm(h_i); norm(embed(token i + 1))]: h_i leaves the last layer of the model. Embedding and head are
the model's. The parameters of the prediction are in modules that start with `NEXT`.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import LAYERS, PREFIX
from shardformer.kernels.attention import Plain
from shardformer.kernels.linear import linear
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.parallel.replicas import Replicated
from shardformer.shards.dropout import Dropout
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import draw_only, weight
from shardformer.shards.projection import ProjectionShard
from shardformer.shards.transformer import CausalTransformerShard, transform

NEXT = "next/"  # of its parameters' modules, behind PREFIX
HEAD_NORM = "head_norm"


class TwoPredictions(NamedTuple):
    """The means that training minimises of both predictions, and the losses of every token, without gradients."""

    loss: Array
    token: TokenLoss
    second_loss: Array
    second_token: TokenLoss


@dataclasses.dataclass
class JoinShard(hk.Module):
    """The product of a token's activations and the next token's embedding with W, which is split by columns."""

    config: Config
    name: str = "join"

    def __call__(self, x_BTD: Array, next_BTD: Array) -> Array:
        """Returns the input of the further layer, split as `x_BTD` is."""
        c, tokens_split = self.config, self.config.parallel.sequence_parallel
        both_BTI = jnp.concatenate([Norm(c, "hidden_norm")(x_BTD), Norm(c, "token_norm")(next_BTD)], -1)
        both_BTI = collectives.fan_out(both_BTI, tokens_split)
        D = c.model.d_model
        w_Id = weight("w", [2 * D, collectives.local(D)], c.model.matrix_std or 1 / math.sqrt(2 * D))
        return collectives.gather_last(linear(both_BTI, w_Id.astype(both_BTI.dtype)), tokens_split)


class NextTransformerShard(CausalTransformerShard):
    """`CausalTransformerShard` with `losses` of both predictions."""

    def __init__(self, layout):
        super().__init__(layout)
        c = self.config
        # The layer's parameters are gathered with those outside the layers.
        self._ungathered = CausalTransformerShard(dataclasses.replace(layout, replicas=Replicated()))
        without_z = c.replace(z_loss=0.0)
        self._join = transform(lambda *args: JoinShard(c)(*args))
        self._second_loss = transform(lambda *args: ProjectionShard(without_z, layout.loss_chunk).loss(*args))

    def init_next(self, key: Array) -> dict:
        """Draws the parameters of the prediction on axes of size 1; its layer is a stack of one, without experts."""
        c, position_T = self.config, jnp.arange(self.config.model.seq)

        def create():
            zeros_BTD = jnp.zeros((1, c.model.seq, c.model.d_model), jnp.float32)
            x_BTD = JoinShard(c)(zeros_BTD, zeros_BTD)
            layer = functools.partial(draw_only, lambda: self._layer(c, Plain())(x_BTD, self._options(position_T)))
            hk.transparent_lift(jax.vmap(layer))(jax.random.split(hk.next_rng_key(), 1))
            if not c.model.sum_norms:
                Norm(c, HEAD_NORM)(x_BTD)

        return {f"{PREFIX}{NEXT}{module}": leaves for module, leaves in draw_only(create, key).items()}

    def losses(self, params: dict, batch: dict, dropout: Dropout | None = None, counts: Any = None) -> TwoPredictions:
        """Returns the losses of this shard's rows; `batch` has `next_tokens` and the targets behind them as well."""
        tokens_BT, documents_BT, weights_BT = batch["tokens"], batch.get("documents"), batch.get("weights")
        outside, x_BTD, records = self._forward(params, tokens_BT, dropout, documents_BT)
        table = self._tied_table(outside)
        loss, token = self._token_loss(outside, x_BTD, batch["targets"], table, weights_BT)
        loss = self.records.complete(loss, records, counts)
        prediction_params = {
            module.removeprefix(NEXT): leaves for module, leaves in outside.items() if module.startswith(NEXT)
        }
        h_BTD = self._continue(outside, prediction_params, x_BTD, batch, dropout)
        head = outside | {"head/norm": prediction_params.get(HEAD_NORM, {})}
        return TwoPredictions(
            loss, token, *self._second_loss(head, h_BTD, batch["second_targets"], table, batch["second_weights"])
        )

    def _continue(self, outside, prediction_params: dict, x_BTD: Array, batch: dict, dropout: Dropout | None) -> Array:
        """Returns the activations behind the further layer, which has the attention of the model's last one."""
        layout, options, position_BT = self._lay_out_rows(outside, batch["tokens"], dropout, batch.get("documents"))
        layers = self.config.model.layers
        next_position_BT = jnp.minimum(position_BT + 1, self.config.model.seq - 1)  # the last token has no target
        before = self._previous and self._previous.list_before_next(layout.attention, batch["tokens"])
        next_BTD = self._embed(outside, batch["next_tokens"], next_position_BT, before)
        if dropout:
            next_BTD = dropout.at(layers + 2)(next_BTD)
        masks = dropout and dropout.at(layers + 1)

        def layer(x_BTD, stored):
            return self._ungathered._apply(layout, stored, layers - 1, x_BTD, options, masks)[0]

        stack = {
            module: leaves for module, leaves in prediction_params.items() if f"{PREFIX}{module}".startswith(LAYERS)
        }
        stored = {f"{PREFIX}{module}": jax.tree.map(lambda p: p[0], leaves) for module, leaves in stack.items()}
        return layout.remat.recompute_layer(layer, in_loop=False)(
            self._join(prediction_params, x_BTD, next_BTD), stored
        )
