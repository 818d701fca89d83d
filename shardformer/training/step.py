"""The compiled functions of training on one mesh: a step, the sums of an evaluation, the norms of gradients."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import optim, programs
from shardformer.config import Config
from shardformer.kernels import example_norms
from shardformer.model import Model, Sums, with_shardings
from shardformer.training.accumulation import Scan, make_accumulation
from shardformer.training.update import StepMetrics, TrainState, Update

__all__ = ["IN_FLIGHT", "StepMetrics", "TrainState", "Trainer", "choose_steps_ahead"]

IN_FLIGHT = 4  # metrics are read this many steps late, so that the device never waits for the host
SLOW_STEP = 0.5  # seconds; one step ahead is enough to keep the device busy
VERY_SLOW_STEP = 2.0  # seconds; the host's milliseconds between two steps no longer matter


def choose_steps_ahead(seconds_per_step: float) -> int:
    """Returns how many steps to dispatch ahead of the one that is waited for. A run that stops waits for all."""
    if seconds_per_step > VERY_SLOW_STEP:
        return 0
    return 1 if seconds_per_step > SLOW_STEP else IN_FLIGHT


class Trainer:
    """The model, the optimizer and their compiled functions for one configuration and mesh."""

    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.model = Model(config, mesh)
        self.model.check_attention()
        self.update = Update(config, self.model)
        self.optimizer = self.update.optimizer
        self.shardings = self.update.make_shardings()
        self.compiled_step = Scan(self.update, self.shardings).program  # the step in one program, in every accum_mode
        self.accumulation = make_accumulation(config, self.update, self.shardings)
        replicated = self.model.sharding(P())
        self._start = programs.jit(self.update.start, donate_argnums=0, out_shardings=self.shardings)
        self._gradient_metrics = programs.jit(self.measure_examples, out_shardings=replicated)
        self._sums = programs.jit(self.model.sums, out_shardings=replicated)

    @property
    def abstract(self) -> TrainState:
        """Shapes and shardings without arrays, onto which a checkpoint is restored."""
        shapes = jax.eval_shape(self.update.start, self.model.shapes)
        return with_shardings(shapes, self.shardings)

    def init(self) -> TrainState:
        """Returns the state before the first step, from the seed."""
        return self.start(self.model.init(self.config.seed))

    def start(self, params) -> TrainState:
        """Returns the state before the first step, from float32 parameters, which it consumes."""
        return self._start(params)

    def step(self, state: TrainState, batch, step: int) -> tuple[TrainState, jax.Array]:
        """Dispatches one update with the batch made for `step`; consumes `state`. The metrics are one array."""
        return self.accumulation.step(state, self.to_devices(batch), np.int32(step))

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """Returns the programs that a step runs, for a caller to compile and inspect."""
        return self.accumulation.lower(state, self.to_devices(batch))

    @staticmethod
    def read_metrics(metrics: jax.Array) -> StepMetrics:
        """Waits for the step, and returns its metrics."""
        return StepMetrics(*np.asarray(metrics).tolist()[: len(StepMetrics._fields)])

    def sums(self, params, batch) -> Sums:
        """Returns the weighted sums over one batch."""
        return self._sums(params, self.to_devices(batch))

    def gradient_metrics(self, state: TrainState, batch) -> dict[str, float]:
        """Returns statistics of single examples' gradients, for the step that `state` is about to take; waits."""
        found = self._gradient_metrics(state, self.to_devices(batch))
        return {name: np.asarray(value).tolist() for name, value in found.items()}

    @property
    def local_rows(self) -> np.ndarray:
        """The rows of a global batch that this process's devices hold. A pod's mesh may interleave its hosts."""
        held = self.model.sharding(self.model.row_spec).addressable_devices_indices_map((self.config.batch,)).values()
        every = np.arange(self.config.batch)
        return np.unique(np.concatenate([every[index] for index in held]))

    def to_devices(self, batch) -> dict[str, jax.Array]:
        """Places this process's rows as its part of a global array."""
        sharding = self.model.sharding(self.model.row_spec)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows, (self.config.batch, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def dropout_key(self, step) -> jax.Array:
        """Returns the key data of a step's dropout masks."""
        return self.update.dropout_key(step)

    def measure_examples(self, state: TrainState, batch) -> dict[str, jax.Array]:
        """Measures the norms of single examples' gradients, in all and by layer, and the gradient noise.

        The noise scale is the ratio of the sums of variance and signal over many steps.
        """
        key = self.dropout_key(state.step)
        squares = optim.rules.zero_frozen(self.model.example_square_norms(state.params, batch, key), self.config)
        grads = optim.rules.zero_frozen(self.model.loss_and_grad(state.params, batch, key)[1], self.config)
        norm_B = jnp.sqrt(example_norms.sum_all(squares))
        noise = example_norms.estimate_noise(jnp.square(norm_B), jnp.square(self.model.norm(grads)))
        by_layer = jnp.sqrt(example_norms.sum_by_layer(squares)).mean(0)
        return {
            "example_norm_mean": norm_B.mean(),
            "example_norm_max": norm_B.max(),
            "noise_variance": noise.variance,
            "noise_signal": noise.signal,
        } | {f"example_norm_layer_{i}": by_layer[i] for i in range(self.config.layers)}
