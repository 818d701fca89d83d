"""Measurements of the model without an update: losses of a batch and of tokens, norms of gradients, experts' tokens."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from shardformer import collectives
from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.model.model import Model, count_routes, normalise_weights
from shardformer.parallel import example_norms
from shardformer.parallel.microbatch import AccumulationType


class Sums(NamedTuple):
    """Weighted sums over the tokens of a batch, for an evaluation of two or more batches."""

    tokens: jax.Array
    nats: jax.Array
    correct: jax.Array
    bytes: jax.Array  # of the text that the targets stand for; 0 if the batch has no "bytes"


class Measures:
    """The functions that measure a model, without changing it."""

    def __init__(self, model: Model):
        self.model = model

    def sums(self, params, batch) -> Sums:
        """Returns the sums of a batch in which each target has a weight (0 for padding).

        Runs `accum` microbatches in sequence, as a step does.
        """
        m = self.model

        def body(params, batch):
            params = m.replicas.make_local(params)

            def sums(batch):
                batch = m.layout.attention.take_batch(batch)
                _, token = m.shard.loss(params, batch["tokens"], batch["targets"], None, batch.get("documents"))
                weight_BT = batch["weights"]
                correct_BT = weight_BT * token.correct_BT.astype(jnp.float32)
                sums = Sums(weight_BT, weight_BT * token.nats_BT, correct_BT, batch.get("bytes", weight_BT * 0))
                return jax.tree.map(jnp.sum, sums)

            return collectives.psum(
                m.run_rows(sums, batch, accumulator=AccumulationType.SUM), m.config.parallel.token_axes
            )

        return m.shard_map(body, (m.specs, m.row_spec), P())(params, batch)

    def token_loss(self, params, tokens, targets) -> TokenLoss:
        """Returns the loss of every token, split over dp."""
        m, attention = self.model, self.model.layout.attention

        def body(params, tokens, targets):
            local = attention.take_tokens(tokens), attention.take_tokens(targets)
            return attention.join_rows(m.shard.loss(m.replicas.make_local(params), *local)[1])

        return m.shard_map(body, (m.specs, m.row_spec, m.row_spec), m.row_spec)(params, tokens, targets)

    def example_square_norms(self, params, batch, dropout_key):
        """Returns the squared norm of every example's gradient by parameter, split over dp; see example_norms.py."""
        m = self.model

        def body(params, batch, dropout_key):
            params = m.replicas.make_local(params)

            def objective(trainable, row):
                return m.local_objective(m.trainable.replace(params, trainable), row, dropout_key)[0]

            trainable = m.trainable.select(params)
            return example_norms.measure_squares(objective, trainable, m.number_rows(batch), m.grad_specs)

        in_specs = m.specs, m.row_spec, P()
        return m.shard_map(body, in_specs, m.row_spec)(params, normalise_weights(batch), dropout_key)


def measure_routes(model: Model, params, batch, dropout_key=None) -> jax.Array:
    """Returns count_LE of a batch, without dropout unless there is a key. Global view."""

    def body(params, batch, dropout_key):
        params, rows = model.replicas.make_local(params), model.number_rows(batch)
        return count_routes(model, params, rows, dropout_key)

    return model.shard_map(body, (model.specs, model.row_spec, P()), P())(params, batch, dropout_key)
