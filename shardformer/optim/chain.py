"""The optimizer: clip by the true global norm, adam, decoupled decay of the matrices, the schedule's rate."""

import jax
import optax
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.optim.schedule import learning_rate

# Matrices by name: stacked layers give every leaf one more axis, so a bias has the shape of a matrix.
DECAYED = {"tokens", "q", "k", "v", "o", "up", "down", "w"}


def make(config: Config) -> optax.GradientTransformationExtraArgs:
    """Its update takes `step=state.step`: the schedule keeps no counter of its own."""
    chain = optax.chain(
        optax.clip_by_global_norm(config.clip) if config.clip else optax.identity(),
        optax.scale_by_adam(config.beta1, config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        _scale_by_rate_at_step(learning_rate(config)),
    )

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts; our own code is strict
            return chain.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(chain.init, update)


def specs(optimizer: optax.GradientTransformation, parameters, parameter_specs):
    """PartitionSpecs of the optimizer's state: moments lie as their parameters do, counters everywhere."""
    state = jax.eval_shape(optimizer.init, parameters)
    return optax.tree_map_params(
        optimizer, lambda _, spec: spec, state, parameter_specs, transform_non_params=lambda _: P()
    )


def _decayed(parameters):
    return {module: {name: name in DECAYED for name in leaves} for module, leaves in parameters.items()}


def _scale_by_rate_at_step(schedule: optax.Schedule) -> optax.GradientTransformationExtraArgs:
    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
