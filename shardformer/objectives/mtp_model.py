"""Multi-token prediction: the language model, and a module that predicts the token after the next.

DeepSeek-V3, section 2.2, with one module. Only training uses the module.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.kernels.threefry import THREEFRY
from shardformer.layout import resolve, specs
from shardformer.model import flops
from shardformer.model.model import Model, average_tokens, normalise_weights
from shardformer.shards.next_transformer import NextTransformerShard


class MtpLoss(NamedTuple):
    """Means over the tokens of a batch; the first three are those of `Loss`."""

    loss: jax.Array  # the cross-entropy of the next token in nats
    z_loss: jax.Array
    accuracy: jax.Array
    mtp_loss: jax.Array  # the cross-entropy of the token after it


class MtpModel(Model):
    """`Model` with the further prediction. A batch gets `next_tokens`, `second_targets` and `second_weights`."""

    losses = MtpLoss
    shard: NextTransformerShard
    shard_class = NextTransformerShard

    @staticmethod
    def abstract_parameters(config: Config) -> dict:
        return Model.abstract_parameters(config) | find_next_shapes(config)

    def draw_parameters(self, seed) -> dict:
        return super().draw_parameters(seed) | _draw_next(self.config.architecture, seed)

    def make_base_model(self, base: Config) -> Model:
        """Returns the model that has the parameters of a base: a language model, or one with this prediction."""
        if base.preferences.objective == "mtp":
            return self
        return Model.on(self.config.objective.as_language_model(), self.mesh)

    @staticmethod
    def count_flops(config: Config) -> float:
        c = config.model
        plain = flops.flops_per_token(config.objective.as_language_model())
        head = c.padded_vocab * c.table_size + (c.d_model * c.table_size if c.table_size != c.d_model else 0)
        parameters = specs.count_parameters(find_next_shapes(config)) + head
        return plain + 6 * parameters + 3 * flops.attention_flops(config, slice(-1, None))

    def prepare(self, batch):
        """Returns the batch with the tokens, the targets and the weights of the next position.

        The last token of a row and of a document has no second target.
        """
        weights_BT = batch.get("weights", jnp.ones(batch["tokens"].shape, jnp.float32))
        has_second_BT = jnp.arange(weights_BT.shape[1])[None] < weights_BT.shape[1] - 1
        if "documents" in batch:
            has_second_BT = has_second_BT & (batch["documents"] == _shift(batch["documents"]))
        second_weights = normalise_weights({"weights": jnp.where(has_second_BT, _shift(weights_BT), 0.0)})["weights"]
        added = {"next_tokens": _shift(batch["tokens"]), "second_targets": _shift(batch["targets"])}
        return normalise_weights(batch) | added | {"second_weights": second_weights}

    # Shard view.

    def local_objective(self, params, batch, dropout_key=None, counts=None):
        """Returns (the minimised loss, `MtpLoss`) of this shard's rows; `counts` is the result of `count_first`."""
        tokens = batch["tokens"].shape[1]
        batch = self.layout.attention.take_batch(batch)
        result = self.shard.losses(params, batch, self.draw_masks(dropout_key, batch, tokens), counts)
        weights_BT, token = batch.get("weights", 1.0), result.token
        by_token = token.nats_BT, jnp.square(token.log_z_BT), token.correct_BT.astype(jnp.float32)
        of_second = average_tokens(result.second_token.nats_BT * batch["second_weights"])
        losses = MtpLoss(*(average_tokens(x_BT * weights_BT) for x_BT in by_token), of_second)
        return result.loss + self.config.preferences.mtp_weight * result.second_loss, lax.stop_gradient(losses)


def _shift(x_BT):
    """Returns the values of the next position."""
    return jnp.roll(x_BT, -1, axis=1)


def find_next_shapes(config: Config) -> dict:
    """Returns the shapes of the parameters of the prediction."""
    return jax.tree.map(lambda leaf: leaf, _next_shapes(config.architecture))  # a copy of the cached tree


@functools.lru_cache
def _next_shapes(architecture: Config):
    return jax.eval_shape(functools.partial(_draw_next, architecture), np.int32(0))


def _draw_next(architecture: Config, seed) -> dict:
    """Draws the parameters of the prediction, as `Model` draws all others."""
    key = jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), Stream.NEXT)
    return NextTransformerShard(resolve(architecture)).init_next(key)
