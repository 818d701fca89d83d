"""TrainState and the two compiled functions of training: a step and an evaluation. Global view."""

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.config import Config
from shardformer.model import ROWS, Loss, Model, with_shardings

# Metrics are read this many steps late, so that the device never waits for the host. It is also the bound on steps in
# flight, without which several CPU devices deadlock on one thread pool.
IN_FLIGHT = 4
DROPOUT_STREAM = 1 << 20  # far from the few keys that initialisation splits off the same seed


class TrainState(NamedTuple):
    """All that a step changes, and all that a checkpoint keeps."""

    step: jax.Array  # steps done: the schedule, the batch, the dropout key and every name derive from it
    params: Any
    optimizer: Any


class StepMetrics(NamedTuple):
    """Of one step, before its update."""

    loss: float
    z_loss: float
    accuracy: float
    grad_norm: float


class Evaluation(NamedTuple):
    loss: float  # nats per token
    accuracy: float
    tokens: int


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
        self._step = jax.jit(self.update, donate_argnums=0, out_shardings=(self.shardings, everywhere))
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
        return self._step(state, self.to_devices(batch), np.int32(step))

    @staticmethod
    def read(metrics: jax.Array) -> StepMetrics:
        """Waits for the step."""
        return StepMetrics(*np.asarray(metrics).tolist())

    def evaluate(self, params, batches: Iterable, on_batch: Callable[[int], None] = lambda done: None) -> Evaluation:
        """Over all batches, each target weighted."""
        total = np.zeros(3)
        pending = deque()
        for done, batch in enumerate(batches, start=1):
            pending.append(self._sums(params, self.to_devices(batch)))
            if len(pending) > IN_FLIGHT:
                total += np.array(pending.popleft(), np.float64)
            on_batch(done)
        for sums in pending:
            total += np.array(sums, np.float64)
        tokens, nats, correct = total.tolist()
        return Evaluation(nats / tokens, correct / tokens, int(tokens))

    @property
    def rows(self) -> slice:
        """The rows of a global batch that this process's devices hold."""
        shape = (self.config.batch,)
        held = self.model.sharding(ROWS).addressable_devices_indices_map(shape).values()
        bounds = [rows[0].indices(self.config.batch) for rows in held]
        return slice(min(start for start, _, _ in bounds), max(stop for _, stop, _ in bounds))

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
        metrics = jnp.stack([*losses, optax.tree.norm(grads)])
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params, step=state.step)
        updated = TrainState(state.step + 1, optax.apply_updates(state.params, updates), optimizer)
        sound = jnp.isfinite(metrics).all() & (batch_step == state.step)
        return jax.tree.map(lambda new, old: jnp.where(sound, new, old), updated, state), metrics

    def dropout_key(self, step):
        key = jax.random.fold_in(jax.random.key(self.config.seed), DROPOUT_STREAM)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def _initial(self, params) -> TrainState:
        return TrainState(jnp.zeros((), jnp.int32), params, self.optimizer.init(params))
