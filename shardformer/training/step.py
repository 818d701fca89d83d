"""One training step: the gradient of a batch, the update of the state, and the guard. Global view.

`OneProgram.train_step` computes the gradient and calls `Update.apply`: `measure`, `guard` and, for a good step,
`advance`. A feature that is on takes part in a step as a `Part`. A plain step has no parts.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import optim
from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.devices import programs
from shardformer.devices.chips import find_options
from shardformer.kernels.threefry import THREEFRY
from shardformer.model import Loss, TaskOnMesh

NO_ARRAYS: dict = {}  # no code adds to it


class TrainState(NamedTuple):
    """The arrays that a step changes and a checkpoint keeps, or their shapes, specs or shardings.

    A field that is empty by default belongs to a `Part`.
    """

    step: Any  # completed steps; schedule, data order, dropout key and checkpoint names derive from it
    params: Any
    optimizer: Any
    average: Any = NO_ARRAYS
    masters: Any = NO_ARRAYS
    guard: Any = NO_ARRAYS
    rollout: Any = NO_ARRAYS


class Measured(NamedTuple):
    """The metrics of a step that are known before its update, which the guard judges."""

    loss: jax.Array
    z_loss: jax.Array
    accuracy: jax.Array
    grad_norm: jax.Array


class StepMetrics(NamedTuple):
    """The metrics of one step: the losses before its update, and the size of the update."""

    loss: Any
    z_loss: Any
    accuracy: Any
    grad_norm: Any
    update_norm: Any
    lr: Any


class Part:
    """A feature that takes part in a step. A method that is not overridden changes nothing."""

    def start(self, params) -> dict:
        """Returns this part's fields of the first TrainState, from float32 parameters."""
        return {}

    def specs(self, model: TaskOnMesh) -> dict:
        """Returns the PartitionSpecs of these fields."""
        return {}

    def optimizer_arguments(self, state: TrainState, batch, key, losses: Loss, grads) -> dict:
        """Returns further arguments of the optimizer's update."""
        return {}

    def select_gradient(self, state: TrainState, grads):
        """Returns the gradient whose norm is measured and clipped."""
        return grads

    def select_trainable(self, state: TrainState, trainable):
        """Returns the float32 parameters that the optimizer updates."""
        return trainable

    def select_rate(self, optimizer_state, rate):
        """Returns the learning rate to be logged."""
        return rate

    def finish(self, before: TrainState, after: TrainState, trained) -> TrainState:
        """Returns the state after an update with this part's fields, from the new trainable parameters."""
        return after

    def leave_out(self, state: TrainState) -> TrainState:
        """Returns the state after a step that is not applied."""
        return state

    def accepts(self, state: TrainState, measured: Measured) -> jax.Array | bool:
        """Returns whether the step may be applied."""
        return True

    def record(self, before: TrainState, after: TrainState, metrics, batch_step, applied) -> tuple[TrainState, tuple]:
        """Returns the state and the metrics after a step, applied or not."""
        return after, metrics


class Update:
    """The update of a training state by gradients, and the guard against bad steps, as pure functions."""

    def __init__(self, config: Config, model: Any, parts: tuple[Part, ...] = ()):
        self.config, self.model, self.parts = config, model, parts
        self.learning_rate = optim.learning_rate(config)
        self.optimizer = optim.make_optimizer(config, model.map_matrices)

    def apply(self, state: TrainState, losses: Loss, grads, batch_step, **arguments) -> tuple[TrainState, tuple]:
        """Returns the state after an update by mean gradients, and the step's metrics.

        `arguments` are passed to the optimizer; see `Part.optimizer_arguments`.
        """
        measured = self.measure(state, losses, grads)
        return self.guard(state, measured, batch_step, lambda: self.advance(state, grads, measured, **arguments))

    def measure(self, state: TrainState, losses: Loss, grads) -> Measured:
        """Returns the losses and the norm of the gradient."""
        for part in self.parts:
            grads = part.select_gradient(state, grads)
        return Measured(losses.loss, losses.z_loss, losses.accuracy, self.model.norm(grads))

    def advance(self, state: TrainState, grads, measured: Measured, **arguments):
        """Returns the state after one update, the norm of the update, and the learning rate."""
        before = self.trainable(state)
        # Elementwise on each device's part: no collective but those of the two norms (muon and lbfgs have others).
        updates, optimizer_state = self.optimizer.update(
            grads, state.optimizer, before, step=state.step, norm=measured.grad_norm, **arguments
        )
        trained = jax.tree.map(add_if_finite, before, updates)
        after = state._replace(
            step=state.step + 1,
            params=self.model.trainable.replace(state.params, trained),
            optimizer=optimizer_state,
        )
        rate = self.learning_rate(state.step)
        for part in self.parts:
            after, rate = part.finish(state, after, trained), part.select_rate(optimizer_state, rate)
        moved = jax.tree.map(jnp.subtract, trained, before)
        return after, self.model.norm(moved), rate

    def guard(self, state: TrainState, measured: Measured, batch_step, advance: Callable) -> tuple[TrainState, tuple]:
        """Returns advance()'s state and the metrics, or the unchanged state if the step is bad.

        A step is bad if its losses or its gradient are not finite. Steps that were dispatched after it are no-ops too:
        their `batch_step` no longer equals `state.step`. The norm of the update is not checked: waiting for it would
        keep all updates and moments in memory twice.
        """
        applied, unchanged = self.judge(state, measured, batch_step)
        left_out = unchanged, jnp.float32(0), jnp.float32(0)
        after, update_norm, rate = lax.cond(applied, advance, lambda: left_out)
        return self.record(state, after, StepMetrics(*measured, update_norm, rate), batch_step, applied)

    def judge(self, state: TrainState, measured: Measured, batch_step) -> tuple[jax.Array, TrainState]:
        """Returns whether the step is good, and the state after a bad one."""
        applied = jnp.isfinite(jnp.stack(measured)).all() & (batch_step == state.step)
        unchanged = state
        for part in self.parts:
            applied, unchanged = applied & part.accepts(state, measured), part.leave_out(unchanged)
        return applied, unchanged

    def record(self, state: TrainState, after: TrainState, metrics: tuple, batch_step, applied):
        """Returns the state and the metrics after a step, as the parts record them."""
        for part in self.parts:
            after, metrics = part.record(state, after, metrics, batch_step, applied)
        return after, metrics

    def trainable(self, state: TrainState):
        """Returns the parameters that the optimizer updates, in float32."""
        trainable = self.model.trainable.select(state.params)
        for part in self.parts:
            trainable = part.select_trainable(state, trainable)
        return trainable

    def dropout_key(self, step) -> jax.Array:
        """Returns the key data of a step's dropout masks."""
        key = jax.random.fold_in(jax.random.key(self.config.training.seed, impl=THREEFRY), Stream.DROPOUT)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def start(self, params) -> TrainState:
        """Returns the state before the first step, from float32 parameters."""
        optimizer_state = self.optimizer.init(self.model.trainable.select(params))
        state = TrainState(jnp.zeros((), jnp.int32), params, optimizer_state)
        for part in self.parts:
            state = state._replace(**part.start(params))
        return state

    def make_shardings(self) -> TrainState:
        """Returns the NamedSharding of every array of the state."""
        model = self.model
        shapes = model.trainable.select(model.shapes)
        specs = TrainState(P(), model.specs, optim.state_specs(self.optimizer, shapes, model.grad_specs))
        for part in self.parts:
            specs = specs._replace(**part.specs(model))
        return jax.tree.map(model.sharding, specs)


class OneProgram:
    """The full step in one program; the model scans the microbatches, if there are two or more.

    A program returns its metrics as one array, so that the host reads them at once.
    """

    def __init__(self, update: Update, shardings: TrainState):
        self._update = update
        self._program = compile_step(self.train_step, update, shardings)

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        """Runs one step with a batch on the devices; consumes `state`."""
        return self._program(state, batch, step)

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """Returns the programs that a step runs, lowered."""
        return [self._program.lower(state, batch, np.int32(0))]

    def train_step(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        """Computes the gradient and applies it; the program is the compiled form of this function."""
        model, key = self._update.model, self._update.dropout_key(state.step)
        arguments: dict[str, Any] = {}
        losses, grads = model.loss_and_grad(state.params, batch, key)
        for part in self._update.parts:
            arguments |= part.optimizer_arguments(state, batch, key, losses, grads)
        after, metrics = self._update.apply(state, losses, grads, batch_step, **arguments)
        return after, jnp.stack([*metrics, *losses[len(Loss._fields) :]])  # an objective may have further metrics


def compile_step(step: Callable, update: Update, shardings: TrainState):
    """Returns a function of (state, ...) as a program that consumes the state and returns (state, metrics)."""
    outputs, options = (shardings, update.model.sharding(P())), find_options(update.model.mesh)
    return programs.jit(step, donate_argnums=0, out_shardings=outputs, compiler_options=options)


def add_if_finite(parameter, update):
    """Adds the update, except where a weight would overflow."""
    moved = parameter + update
    return jnp.where(jnp.isfinite(moved), moved, parameter)
