"""`grad_metrics`: the norms of single examples' gradients, and the noise of the mean gradient. Global view."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.devices import programs
from shardformer.model.measuring import Measures
from shardformer.optim import rules
from shardformer.parallel import example_norms
from shardformer.training.step import TrainState, Update


class ExampleGradients:
    """The compiled statistics of the gradients of a batch's examples."""

    def __init__(self, update: Update):
        self._update = update
        self._program = programs.jit(self.measure, out_shardings=update.model.sharding(P()))

    def read(self, state: TrainState, batch) -> dict[str, float]:
        """Returns the statistics of a batch on the devices; waits."""
        return {name: np.asarray(value).tolist() for name, value in self._program(state, batch).items()}

    def measure(self, state: TrainState, batch) -> dict[str, jax.Array]:
        """Measures the norms of single examples' gradients, in all and by layer, and the gradient noise.

        The noise scale is the ratio of the sums of variance and signal over many steps.
        """
        model, config, key = self._update.model, self._update.config, self._update.dropout_key(state.step)
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
