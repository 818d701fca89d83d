"""The parts of a step: each feature that a configuration switches on. Global view."""

import jax.numpy as jnp

from shardformer.config import Config
from shardformer.model import Loss, TaskOnMesh, master_weights
from shardformer.training.accumulation import AccumulatedGradient
from shardformer.training.step import Part, TrainState, Update


def choose_update(config: Config) -> type[Update]:
    """Returns the class of the update of a training state."""
    if config.optimizer.offload == "optimizer":
        from shardformer.training.offloaded_update import OffloadedUpdate  # not imported without offload

        return OffloadedUpdate
    return Update


def choose_parts(config: Config, model: TaskOnMesh) -> tuple[Part, ...]:
    """Returns the parts of a configuration's step, in their order; () for a plain step."""
    parts: list[Part] = []
    if config.training.accum_mode == "multisteps":  # with accum=1 too, because accum may change on resume
        parts.append(AccumulatedGradient())
    if config.mixture.moves_router_bias:
        parts.append(RouterBiases())
    if config.optimizer.lr_rules:
        parts.append(FrozenParameters(config, model))
    if config.optimizer.param_dtype != "float32" or config.stored.quantize_aware != "none":
        parts.append(MasterWeights(config))
    if config.training.ema:
        parts.append(WeightAverage(config))
    if config.optimizer.searches_rate:
        parts.append(LineSearch(config, model))
    if config.bad_steps.skip_steps:
        from shardformer.training.rolling_guard import RollingGuard  # not imported without skip_steps

        parts.append(RollingGuard(config))
    if model.batch_is_stored:
        parts.append(StoredBatch(model))
    return tuple(parts)


class RouterBiases(Part):
    """The routers' biases: their gradient is a count, which is no part of the gradient's norm."""

    def select_gradient(self, state: TrainState, grads):
        from shardformer.experts.router_bias import zero_biases  # not imported without experts

        return zero_biases(grads)


class FrozenParameters(Part):
    """The parameters that `lr_rules` freezes: they count neither in the norm of the gradient nor in its limit."""

    def __init__(self, config: Config, model: TaskOnMesh):
        from shardformer.optim import rules  # not imported without lr_rules

        self._config, self._rules = config, rules
        rules.check_rules(model.trainable.select(model.shapes), config)

    def select_gradient(self, state: TrainState, grads):
        return self._rules.zero_frozen(grads, self._config)


class MasterWeights(Part):
    """Parameters that are stored rounded, and the float32 masters that the optimizer updates."""

    def __init__(self, config: Config):
        self._config = config

    def start(self, params) -> dict:
        masters = master_weights.select_masters(params, self._config)
        return {"params": master_weights.round_parameters(params, self._config, 0), "masters": masters}

    def specs(self, model: TaskOnMesh) -> dict:
        return {"masters": master_weights.select_masters(model.grad_specs, self._config)}

    def select_trainable(self, state: TrainState, trainable):
        return master_weights.trainable_parameters(state.params, state.masters, self._config)

    def finish(self, before: TrainState, after: TrainState, trained) -> TrainState:
        masters = master_weights.select_masters(trained, self._config)
        params = master_weights.round_parameters(after.params, self._config, after.step)
        return after._replace(params=params, masters=masters)


class WeightAverage(Part):
    """The exponential moving average of the weights."""

    def __init__(self, config: Config):
        from shardformer.optim import average  # not imported without ema

        self._config, self._average = config, average

    def start(self, params) -> dict:
        return {"average": self._average.start_average(params, self._config)}

    def specs(self, model: TaskOnMesh) -> dict:
        return {"average": self._average.select_averaged(model.specs, self._config)}

    def finish(self, before: TrainState, after: TrainState, trained) -> TrainState:
        return after._replace(average=self._average.update_average(before.average, trained, before.step, self._config))


class LineSearch(Part):
    """The objective of L-BFGS's line search, whose step size is the learning rate."""

    def __init__(self, config: Config, model: TaskOnMesh):
        from shardformer.optim import lbfgs  # not imported for other optimizers

        self._config, self._model, self._lbfgs = config, model, lbfgs

    def optimizer_arguments(self, state: TrainState, batch, key, losses: Loss, grads) -> dict:
        def objective(trainable):
            return self._model.objective(trainable, state.params, batch, key)

        return self._lbfgs.search_arguments(objective, losses, grads, self._config)

    def select_rate(self, optimizer_state, rate):
        return self._lbfgs.step_size(optimizer_state)


class StoredBatch(Part):
    """The batch that a step learns from, such as sampled answers: a resume goes on with it. Zeros before the first."""

    def __init__(self, model: TaskOnMesh):
        self._shapes = model.batch_shapes()

    def start(self, params) -> dict:
        return {"rollout": {name: jnp.zeros(leaf.shape, leaf.dtype) for name, leaf in self._shapes.items()}}

    def specs(self, model: TaskOnMesh) -> dict:
        return {"rollout": dict.fromkeys(self._shapes, model.row_spec)}
