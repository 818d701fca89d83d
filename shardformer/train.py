"""TrainState and the two compiled functions of training: a step, and sums for an evaluation. Global view."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.config import Config
from shardformer.model import ROWS, Loss, Model, Sums, with_shardings

IN_FLIGHT = 4  # metrics are read this many steps late, so that the device never waits for the host
DROPOUT_STREAM = 1 << 20  # far from the few keys that initialisation splits off the same seed


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint keeps."""

    step: jax.Array  # steps done: the schedule, the batch, the dropout key and every name derive from it
    params: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """Of one step: its losses before the update, and the update."""

    loss: float
    z_loss: float
    accuracy: float
    grad_norm: float
    update_norm: float
    lr: float


class Trainer:
    def __init__(self, config: Config, mesh: Mesh):
        self.config = config
        self.model = Model(config, mesh)
        self.learning_rate = optim.learning_rate(config)
        self.optimizer = optim.make(config)
        optimizer_specs = optim.specs(self.optimizer, self.model.shapes, self.model.specs)
        specs = TrainState(P(), self.model.specs, optimizer_specs)
        self.shardings = jax.tree.map(self.model.sharding, specs)
        everywhere = self.model.sharding(P())
        self.compiled_step = jax.jit(self.update, donate_argnums=0, out_shardings=(self.shardings, everywhere))
        self._init_optimizer = jax.jit(self._initial, out_shardings=self.shardings)
        self._sums = jax.jit(self.model.sums, out_shardings=everywhere)

    @property
    def abstract(self) -> TrainState:
        """Shapes and shardings without arrays: what a checkpoint restores onto."""
        shapes = jax.eval_shape(self._initial, self.model.shapes)
        return with_shardings(shapes, self.shardings)

    def init(self) -> TrainState:
        return self._init_optimizer(self.model.init(self.config.seed))

    def step(self, state: TrainState, batch, step: int) -> tuple[TrainState, jax.Array]:
        """One update with the batch made for `step`; consumes `state`. Metrics come as one array: see `read`."""
        return self.compiled_step(state, self.to_devices(batch), np.int32(step))

    @staticmethod
    def read(metrics: jax.Array) -> StepMetrics:
        """Waits for the step."""
        return StepMetrics(*np.asarray(metrics).tolist())

    def sums(self, params, batch) -> Sums:
        """Over one batch, each target weighted."""
        return self._sums(params, self.to_devices(batch))

    @property
    def rows(self) -> np.ndarray:
        """Which rows of a global batch this process's devices hold: a pod's mesh may interleave its hosts."""
        held = self.model.sharding(ROWS).addressable_devices_indices_map((self.config.batch,)).values()
        every = np.arange(self.config.batch)
        return np.unique(np.concatenate([every[index] for index in held]))

    def to_devices(self, batch):
        """This process's rows as its part of a global array."""
        sharding = self.model.sharding(ROWS)
        return {
            name: jax.make_array_from_process_local_data(sharding, rows, (self.config.batch, *rows.shape[1:]))
            for name, rows in batch.items()
        }

    def update(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        """The step itself."""
        losses, grads = self.model.loss_and_grad(state.params, batch, self.dropout_key(state.step))
        return self.apply(state, losses, grads, batch_step)

    def apply(self, state: TrainState, losses: Loss, grads, batch_step) -> tuple[TrainState, jax.Array]:
        """The optimizer's part. Nothing changes if a number is not finite, nor in any step that follows such a one."""
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params, step=state.step)
        norms = optax.tree.norm(grads), optax.tree.norm(updates)
        metrics = jnp.stack([*losses, *norms, self.learning_rate(state.step)])
        updated = TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer)
        sound = jnp.isfinite(metrics).all() & (batch_step == state.step)
        return jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, state), metrics

    def dropout_key(self, step):
        key = jax.random.fold_in(jax.random.key(self.config.seed), DROPOUT_STREAM)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def _initial(self, params) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))
