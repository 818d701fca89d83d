"""The state of training, and the update that takes it from one step to the next. Global view."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import guard, optim
from shardformer.config import Config
from shardformer.config.names import Stream
from shardformer.kernels.threefry import STANDARD
from shardformer.model import Loss, Model, lora, master_weights


class TrainState(NamedTuple):
    """The arrays that a step changes and a checkpoint keeps, or their shapes, specs or shardings."""

    step: Any  # completed steps; schedule, data order, dropout key and checkpoint names derive from it
    params: Any
    optimizer: Any
    average: Any  # of the weights; empty without ema
    masters: Any  # float32 copies of the parameters that are stored in bfloat16; empty if there are none
    guard: Any  # the record of applied and left-out steps; empty without skip_steps


class StepMetrics(NamedTuple):
    """The metrics of one step: the losses before its update, and the size of the update."""

    loss: float
    z_loss: float
    accuracy: float
    grad_norm: float
    update_norm: float
    lr: float


MEASURED = len(Loss._fields) + 1  # the metrics that are known before the update: the losses and grad_norm


class Update:
    """The optimizer, weight average, masters and the guard against non-finite steps, as pure functions."""

    def __init__(self, config: Config, model: Model):
        self.config, self.model = config, model
        self.learning_rate = optim.learning_rate(config)
        self.optimizer = optim.make_optimizer(config, model.map_matrices)
        if config.accum_mode == "multisteps":  # with accum=1 too, because accum may change on resume
            self.optimizer = optim.accumulate_over_calls(self.optimizer, config.accum)
        trainable = lora.select_learned(model.shapes, config)
        optim.rules.check_rules(trainable, config)
        optim.average.check_names(model.shapes, config)

    def make_shardings(self) -> TrainState:
        """Returns the NamedSharding of every array of the state."""
        trainable = lora.select_learned(self.model.shapes, self.config)
        specs = TrainState(
            step=P(),
            params=self.model.specs,
            optimizer=optim.state_specs(self.optimizer, trainable, self.model.grad_specs),
            average=optim.average.select_averaged(self.model.specs, self.config),
            masters=master_weights.select_masters(self.model.grad_specs, self.config),
            guard=jax.tree.map(lambda _: P(), guard.start_record(self.config)),
        )
        return jax.tree.map(self.model.sharding, specs)

    def start(self, params) -> TrainState:
        """Returns the state before the first step, from float32 parameters."""
        step, trainable = jnp.zeros((), jnp.int32), lora.select_learned(params, self.config)
        return TrainState(
            step=step,
            params=master_weights.round_parameters(params, self.config),
            optimizer=optim.round_moments(self.optimizer, self.optimizer.init(trainable), step, self.config),
            average=optim.average.start_average(params, self.config),
            masters=master_weights.select_masters(params, self.config),
            guard=guard.start_record(self.config),
        )

    def dropout_key(self, step) -> jax.Array:
        """Returns the key data of a step's dropout masks."""
        key = jax.random.fold_in(jax.random.key(self.config.seed, impl=STANDARD), Stream.DROPOUT)
        return jax.random.key_data(jax.random.fold_in(key, step))

    def apply(
        self, state: TrainState, losses: Loss, grads, batch_step, objective: Callable | None = None
    ) -> tuple[TrainState, jax.Array]:
        """Returns the state after an update by mean gradients, and the step's metrics as one array.

        `objective` maps trainable parameters to the minimised loss, for optimizers with a line search.
        """
        measured = self.measure(state, losses, grads)
        norm = measured[-1]
        return self.guard(state, measured, batch_step, lambda: self.advance(state, losses, grads, norm, objective))

    def measure(self, state: TrainState, losses: Loss, grads) -> jax.Array:
        """Returns the losses and the gradient norm, [MEASURED]. Frozen parameters do not count, as in the clip."""
        counted = optim.rules.zero_frozen(optim.mean_gradient(state.optimizer, grads), self.config)
        return jnp.stack([*losses, self.model.norm(counted)])

    def guard(self, state: TrainState, measured, batch_step, advance: Callable) -> tuple[TrainState, jax.Array]:
        """Returns advance()'s state and the metrics, or the unchanged state if the step is bad; see guard/.

        Steps that were dispatched after a non-finite step are no-ops too: their `batch_step` no longer equals
        `state.step`. The norm of the update is not checked: waiting for it would keep all updates and moments in
        memory twice.
        """
        sound = guard.judge(state.guard, measured, self.config) & (batch_step == state.step)
        unchanged = state._replace(optimizer=optim.reset_accumulation(state.optimizer)), jnp.float32(0), jnp.float32(0)
        after, update_norm, rate = lax.cond(sound, advance, lambda: unchanged)
        metrics = jnp.stack([*measured, update_norm, rate])
        return guard.note(state, after, metrics, batch_step, sound, self.config)

    def advance(
        self, state: TrainState, losses: Loss, grads, norm, objective: Callable | None = None
    ) -> tuple[TrainState, jax.Array, jax.Array]:
        """Returns the state after one update, the norm of the update, and the learning rate."""
        before = self.trainable(state)
        moments = optim.widen_moments(self.optimizer, state.optimizer, self.config)
        minimised = losses.loss + self.config.z_loss * losses.z_loss
        updates, moments = self.optimizer.update(
            grads, moments, before, step=state.step, norm=norm, value=minimised, grad=grads, value_fn=objective
        )
        trained = jax.tree.map(_add_if_finite, before, updates)
        params = lora.replace_learned(state.params, master_weights.round_parameters(trained, self.config))
        after = TrainState(
            step=state.step + 1,
            params=params,
            optimizer=optim.round_moments(self.optimizer, moments, state.step, self.config),
            average=optim.average.update_average(state.average, trained, state.step, self.config),
            masters=master_weights.select_masters(trained, self.config),
            guard=state.guard,
        )
        moved = jax.tree.map(jnp.subtract, trained, before)
        return after, self.model.norm(moved), optim.step_size(moments, self.learning_rate(state.step))

    def trainable(self, state: TrainState) -> dict:
        """Returns the parameters that the optimizer updates, in float32."""
        return master_weights.learned_parameters(state.params, state.masters, self.config)


def _add_if_finite(parameter, update):
    """Adds the update, except where a weight would overflow."""
    moved = parameter + update
    return jnp.where(jnp.isfinite(moved), moved, parameter)
