"""Measurements of the model without an update: losses of a batch and of tokens, norms of gradients, experts' tokens."""

import jax
from jax.sharding import PartitionSpec as P

from shardformer.kernels.vocabulary_loss import TokenLoss
from shardformer.model.model import Model, count_routes
from shardformer.parallel import example_norms


class Measures:
    """The functions that measure a model, without changing it."""

    def __init__(self, model: Model):
        self.model = model

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
        return m.shard_map(body, in_specs, m.row_spec)(params, m.prepare(batch), dropout_key)


def measure_routes(model: Model, params, batch, dropout_key=None) -> jax.Array:
    """Returns count_LE of a batch, without dropout unless there is a key. Global view."""

    def body(params, batch, dropout_key):
        params, rows = model.replicas.make_local(params), model.number_rows(batch)
        return count_routes(model, params, rows, dropout_key)

    return model.shard_map(body, (model.specs, model.row_spec, P()), P())(params, batch, dropout_key)
