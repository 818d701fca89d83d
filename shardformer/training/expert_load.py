"""The load of each layer's experts under the batch of a logged step. Global view."""

from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.devices import programs
from shardformer.model.measuring import measure_routes
from shardformer.training.step import TrainState, Update


class ExpertLoad:
    """The compiled counts of the pairs of a token and an expert."""

    def __init__(self, update: Update):
        self._update = update
        self._program = programs.jit(self.count, out_shardings=update.model.sharding(P()))

    def read(self, state: TrainState, batch) -> dict[str, float]:
        """Returns the load under a batch on the devices; waits."""
        layers = [i for i, sparse in enumerate(self._update.config.sparse_layers) if sparse]
        return describe_load(np.asarray(self._program(state, batch), np.float64), layers)

    def count(self, state: TrainState, batch) -> jax.Array:
        """Returns count_LE with the dropout of the next step."""
        return measure_routes(self._update.model, state.params, batch, self._update.dropout_key(state.step))


def describe_load(count_LE: np.ndarray, layers: Sequence[int]) -> dict[str, float]:
    """Returns each layer's largest share of the pairs, entropy relative to equal shares, and experts without tokens."""
    result: dict[str, float] = {}
    for layer, count_E in zip(layers, count_LE, strict=True):
        share_E = count_E / count_E.sum()
        used = share_E[share_E > 0]
        entropy = -(used * np.log(used)).sum() / np.log(len(share_E)) if len(share_E) > 1 else 1.0
        result[f"largest_share_layer_{layer}"] = float(share_E.max())
        result[f"entropy_layer_{layer}"] = float(entropy)
        result[f"without_tokens_layer_{layer}"] = float((share_E == 0).sum())
    return result
