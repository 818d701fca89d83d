"""`grad_metrics`: the norms of single examples' gradients, and the noise of the mean gradient. Global view."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.logs.csv_file import Row
from shardformer.model.measuring import Measures
from shardformer.optim import rules
from shardformer.parallel import example_norms
from shardformer.training.step import TrainState
from shardformer.training.step_statistics import StatisticsFile, StepStatistics


class GradientsFile(StatisticsFile):
    """`gradients.csv`: the statistics at each logged step, with the noise scale of the run so far."""

    derived = ("noise_scale",)

    def __init__(self, path: Path, first_step: int):
        super().__init__(path, first_step)
        self._sums = dict.fromkeys(example_norms.Noise._fields, 0.0)

    def derive(self, row: Row | dict[str, float]) -> Row:
        """Returns the noise scale, or None while the estimate of the squared gradient norm is not positive.

        Both estimates are noisy and their ratio is noisier, so the scale is the ratio of their means over the run.
        """
        for name in self._sums:
            self._sums[name] += row[f"noise_{name}"] or 0.0
        return {"noise_scale": self._sums["variance"] / self._sums["signal"] if self._sums["signal"] > 0 else None}


class ExampleGradients(StepStatistics):
    """The statistics of the gradients of a batch's examples."""

    file_name, file_class = "gradients.csv", GradientsFile

    def describe(self, measured: dict[str, jax.Array]) -> dict[str, float]:
        return {name: np.asarray(value).tolist() for name, value in measured.items()}

    def measure(self, state: TrainState, batch) -> dict[str, jax.Array]:
        """Measures the norms of single examples' gradients, in all and by layer, and the gradient noise.

        The noise scale is the ratio of the sums of variance and signal over many steps.
        """
        model, config, key = self.update.model, self.update.config, self.update.dropout_key(state.step)
        squares = rules.zero_frozen(Measures(model).example_square_norms(state.params, batch, key), config)
        grads = rules.zero_frozen(model.loss_and_grad(state.params, batch, key)[1], config)
        norm_B = jnp.sqrt(example_norms.sum_all(squares))
        noise = example_norms.estimate_noise(jnp.square(norm_B), jnp.square(model.norm(grads)))
        by_layer = jnp.sqrt(example_norms.sum_by_layer(squares)).mean(0)
        return {
            "example_norm_mean": norm_B.mean(),
            "example_norm_max": norm_B.max(),
            "noise_variance": noise.variance,
            "noise_signal": noise.signal,
        } | {f"example_norm_layer_{i}": by_layer[i] for i in range(config.model.layers)}
