"""Gradient accumulation over the microbatches of a batch, by two or more calls of one or two programs. Global view.

`accum_mode=scan` is the plain step of `step.py`.
"""

from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.devices import programs
from shardformer.devices.chips import find_options
from shardformer.model import Loss
from shardformer.optim import chain
from shardformer.training.step import Measured, OneProgram, Part, StepMetrics, TrainState, Update, compile_step


class Accumulation(Protocol):
    """The compiled programs of a step; the metrics are one array, in the order of StepMetrics."""

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        """Runs one step with a batch on the devices; consumes `state`."""

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """Returns the programs that a step runs, lowered."""


def make_accumulation(config: Config, update: Update, shardings: TrainState) -> Accumulation:
    """Returns the mode that `accum` and `accum_mode` ask for."""
    modes: dict[str, type[MultiSteps | Manual]] = {"multisteps": MultiSteps, "manual": Manual}
    if update.model.batch_is_stored:
        return StepOfStoredBatch(update, shardings)
    if config.training.accum == 1 or config.training.accum_mode == "scan":
        return OneProgram(update, shardings)
    return modes[config.training.accum_mode](update, shardings)


class StepOfStoredBatch(OneProgram):
    """The step that learns from the batch in its state; see `StoredBatch`."""

    def train_step(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        return super().train_step(state, state.rollout, batch_step)


class AccumulatedGradient(Part):
    """The gradient that optax.MultiSteps has in its state."""

    def select_gradient(self, state: TrainState, grads):
        return chain.mean_gradient(state.optimizer, grads)

    def leave_out(self, state: TrainState) -> TrainState:
        return state._replace(optimizer=chain.reset_accumulation(state.optimizer))


class MultiSteps:
    """One call of optax.MultiSteps for each microbatch; the wrapped optimizer acts at the last."""

    def __init__(self, update: Update, shardings: TrainState):
        self._update, self._count = update, update.config.training.accum
        self._program = compile_step(self.train_step, update, shardings)
        # The first call's metrics have the sharding of later ones, so that one program serves all calls.
        count = len(StepMetrics._fields) + len(update.model.details)
        self.zero_metrics = programs.jit(lambda: jnp.zeros(count), out_shardings=update.model.sharding(P()))

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        metrics = self.zero_metrics()
        for part in range(self._count):
            state, metrics = self._program(state, batch, step, np.int32(part), metrics)
        return state, metrics

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        return [self._program.lower(state, batch, np.int32(0), np.int32(0), self.zero_metrics())]

    def train_step(self, state: TrainState, batch, batch_step, part, metrics) -> tuple[TrainState, jax.Array]:
        """Adds one microbatch to the step; `metrics` are those of the microbatches so far."""
        update, before = self._update, Measured(*metrics[: len(Measured._fields)])
        further = metrics[len(StepMetrics._fields) :]
        part_losses, grads = _loss_and_grad_of_part(update, state, batch, part)
        count = (part + 1).astype(jnp.float32)
        means = update.model.losses(before.loss, before.z_loss, before.accuracy, *further)
        losses = jax.tree.map(lambda mean, loss: mean + (loss - mean) / count, means, part_losses)
        # One non-finite microbatch spoils the step.
        measured = jax.tree.map(
            lambda now, old: jnp.where(jnp.isfinite(old), now, old), update.measure(state, losses, grads), before
        )

        def advance():
            after, update_norm, rate = update.advance(state, grads, measured)
            is_last = part == self._count - 1
            average = jax.tree.map(lambda new, old: jnp.where(is_last, new, old), after.average, state.average)
            return after._replace(step=state.step + jnp.int32(is_last), average=average), update_norm, rate

        after, now = update.guard(state, measured, batch_step, advance)
        return after, jnp.stack([*now, *losses[len(Loss._fields) :]])


class Manual:
    """A program that adds the gradients of one microbatch to their sum, and a program that applies the mean."""

    def __init__(self, update: Update, shardings: TrainState):
        self._update, self._count = update, update.config.training.accum
        model = update.model
        sums_shardings = model.sharding(P()), jax.tree.map(model.sharding, model.grad_specs)  # of losses and gradients
        self._start = programs.jit(self.start_sums, out_shardings=sums_shardings)
        options = find_options(update.model.mesh)
        self.add = programs.jit(self.add_part, donate_argnums=0, out_shardings=sums_shardings, compiler_options=options)
        self.finish = compile_step(self.apply_mean, update, shardings)

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        sums = self._start(state)
        for part in range(self._count):
            sums = self.add(sums, state, batch, np.int32(part))
        return self.finish(state, sums, step)

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        sums, zero = self._start(state), np.int32(0)
        return [self.add.lower(sums, state, batch, zero), self.finish.lower(state, sums, zero)]

    def start_sums(self, state: TrainState):
        """Returns zero sums of losses and gradients."""
        losses, zero = self._update.model.losses, jnp.zeros(())
        return losses(*[zero] * len(losses._fields)), jax.tree.map(jnp.zeros_like, self._update.trainable(state))

    def add_part(self, sums, state: TrainState, batch, part):
        """Adds the losses and gradients of one microbatch to the sums."""
        return jax.tree.map(jnp.add, sums, _loss_and_grad_of_part(self._update, state, batch, part))

    def apply_mean(self, state: TrainState, sums, batch_step) -> tuple[TrainState, jax.Array]:
        """Applies the mean over all microbatches."""
        losses, grads = jax.tree.map(lambda total: total / self._count, sums)
        after, metrics = self._update.apply(state, losses, grads, batch_step)
        return after, jnp.stack([*metrics, *losses[len(Loss._fields) :]])


def _loss_and_grad_of_part(update: Update, state: TrainState, batch, part):
    key = update.dropout_key(state.step)
    return update.model.loss_and_grad_of_part(state.params, batch, key, part)
