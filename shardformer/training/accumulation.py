"""Gradient accumulation: three ways to run a train step over the microbatches of a batch. Global view."""

from collections.abc import Callable
from typing import Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer import programs
from shardformer.config import Config
from shardformer.hardware.compiler_options import find_options
from shardformer.model import Loss
from shardformer.training.update import MEASURED, StepMetrics, TrainState, Update


class Accumulation(Protocol):
    """The compiled programs of a step; the metrics are one array, in the order of StepMetrics."""

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        """Runs one step with a batch on the devices; consumes `state`."""

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        """Returns the programs that a step runs, lowered."""


def make_accumulation(config: Config, update: Update, shardings: TrainState) -> Accumulation:
    """Returns the mode that `accum` and `accum_mode` ask for."""
    modes: dict[str, type[Scan | MultiSteps | Manual]] = {"scan": Scan, "multisteps": MultiSteps, "manual": Manual}
    return modes["scan" if config.accum == 1 else config.accum_mode](update, shardings)


class Scan:
    """The whole step in one program, in which the model scans the microbatches."""

    def __init__(self, update: Update, shardings: TrainState):
        self._update = update
        self.program = _compile(self.update, update, shardings)

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        return self.program(state, batch, step)

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        return [self.program.lower(state, batch, np.int32(0))]

    def update(self, state: TrainState, batch, batch_step) -> tuple[TrainState, jax.Array]:
        """Computes the step; traced by `program`."""
        model, key = self._update.model, self._update.dropout_key(state.step)
        losses, grads = model.loss_and_grad(state.params, batch, key)

        def objective(trainable):
            return model.objective(trainable, state.params, batch, key)

        return self._update.apply(state, losses, grads, batch_step, objective)


class MultiSteps:
    """One call of optax.MultiSteps for each microbatch; the wrapped optimizer acts at the last."""

    def __init__(self, update: Update, shardings: TrainState):
        self._update, self._count = update, update.config.accum
        self.program = _compile(self.update, update, shardings)
        # The first call's metrics have the sharding of later ones, so that one program serves all calls.
        self.zero_metrics = programs.jit(_zero_metrics, out_shardings=update.model.sharding(P()))

    def step(self, state: TrainState, batch, step: np.int32) -> tuple[TrainState, jax.Array]:
        metrics = self.zero_metrics()
        for part in range(self._count):
            state, metrics = self.program(state, batch, step, np.int32(part), metrics)
        return state, metrics

    def lower(self, state: TrainState, batch) -> list[jax.stages.Lowered]:
        return [self.program.lower(state, batch, np.int32(0), np.int32(0), self.zero_metrics())]

    def update(self, state: TrainState, batch, batch_step, part, before) -> tuple[TrainState, jax.Array]:
        """Adds one microbatch to the step; `before` holds the metrics of the microbatches so far."""
        update = self._update
        part_losses, grads = _loss_and_grad_of_part(update, state, batch, part)
        count = (part + 1).astype(jnp.float32)
        means = zip(before[: len(part_losses)], part_losses, strict=True)
        losses = Loss(*[mean + (loss - mean) / count for mean, loss in means])
        measured, earlier = update.measure(state, losses, grads), before[:MEASURED]
        measured = jnp.where(jnp.isfinite(earlier), measured, earlier)  # one non-finite microbatch spoils the step

        def advance():
            after, update_norm, rate = update.advance(state, losses, grads, measured[-1])
            is_last = part == self._count - 1
            average = jax.tree.map(lambda new, old: jnp.where(is_last, new, old), after.average, state.average)
            return after._replace(step=state.step + jnp.int32(is_last), average=average), update_norm, rate

        return update.guard(state, measured, batch_step, advance)


class Manual:
    """A program that adds the gradients of one microbatch to their sum, and a program that applies the mean."""

    def __init__(self, update: Update, shardings: TrainState):
        self._update, self._count = update, update.config.accum
        model = update.model
        sums_shardings = model.sharding(P()), jax.tree.map(model.sharding, model.grad_specs)  # of losses and gradients
        self._start = programs.jit(self.start_sums, out_shardings=sums_shardings)
        options = find_options(update.model.mesh)
        self.add = programs.jit(self.add_part, donate_argnums=0, out_shardings=sums_shardings, compiler_options=options)
        self.finish = _compile(self.apply_mean, update, shardings)

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
        zero = jnp.zeros(())
        return Loss(zero, zero, zero), jax.tree.map(jnp.zeros_like, self._update.trainable(state))

    def add_part(self, sums, state: TrainState, batch, part):
        """Adds the losses and gradients of one microbatch to the sums."""
        return jax.tree.map(jnp.add, sums, _loss_and_grad_of_part(self._update, state, batch, part))

    def apply_mean(self, state: TrainState, sums, batch_step) -> tuple[TrainState, jax.Array]:
        """Applies the mean over all microbatches."""
        losses, grads = jax.tree.map(lambda total: total / self._count, sums)
        return self._update.apply(state, losses, grads, batch_step)


def _compile(step: Callable, update: Update, shardings: TrainState):
    """Returns a function of (state, ...) as a program that consumes the state and returns (state, metrics)."""
    outputs, options = (shardings, update.model.sharding(P())), find_options(update.model.mesh)
    return programs.jit(step, donate_argnums=0, out_shardings=outputs, compiler_options=options)


def _loss_and_grad_of_part(update: Update, state: TrainState, batch, part):
    key = update.dropout_key(state.step)
    return update.model.loss_and_grad_of_part(state.params, batch, key, part)


def _zero_metrics() -> jax.Array:
    return jnp.zeros(len(StepMetrics._fields))
