"""The load of each layer's experts: `experts.csv`. Global view."""

from collections.abc import Sequence

import jax
import numpy as np

from shardformer.logs.metrics_file import EXPERTS_FILE
from shardformer.model.measuring import measure_routes
from shardformer.training.step import TrainState
from shardformer.training.step_statistics import StepStatistics


class ExpertLoad(StepStatistics):
    """The counts of the pairs of a token and an expert, and the load that they are described by."""

    file_name = EXPERTS_FILE

    def describe(self, measured: jax.Array) -> dict[str, float]:
        layers = [i for i, sparse in enumerate(self.update.config.mixture.sparse_layers) if sparse]
        return describe_load(np.asarray(measured, np.float64), layers)

    def measure(self, state: TrainState, batch) -> jax.Array:
        """Returns count_LE with the dropout of the next step."""
        return measure_routes(self.update.model, state.params, batch, self.update.dropout_key(state.step))


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
