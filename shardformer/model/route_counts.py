"""Counts of the pairs of a token and an expert over a global batch, before or without its gradient."""

from jax import Array
from jax.sharding import PartitionSpec as P

from shardformer.model.model import Model
from shardformer.parallel.microbatch import AccumulationType


def count_routes(model: Model, params, batch, dropout_key) -> Array:
    """Returns count_LE of the global batch by a forward pass. Shard view, of local parameters."""

    def count(rows):
        return model.shard.records.count(model.local_records(params, rows, dropout_key))

    return model.run_rows(count, batch, accumulator=AccumulationType.SUM)


def measure_routes(model: Model, params, batch, dropout_key=None) -> Array:
    """Returns count_LE of a batch, without dropout unless there is a key. Global view."""

    def body(params, batch, dropout_key):
        params, rows = model.replicas.make_local(params), model.number_rows(batch)
        return count_routes(model, params, rows, dropout_key)

    return model.shard_map(body, (model.specs, model.row_spec, P()), P())(params, batch, dropout_key)
