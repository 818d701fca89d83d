"""The optimizer: clip by the true global norm, a direction, decoupled decay of the matrices, the schedule's rate."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P
from optax.transforms import chain  # while shardformer.legacy is installed, optax.chain is replaced

from shardformer.config import Config
from shardformer.model import lora
from shardformer.optim import lbfgs, name_patterns, rules
from shardformer.optim.muon import scale_by_muon
from shardformer.optim.schedule import learning_rate

# Matrices by name: stacked layers give every leaf one more axis, so a bias has the shape of a matrix.
DECAYED = {"tokens", "q", "k", "v", "o", "up", "gate", "down", "w"}


def make_optimizer(config: Config) -> optax.GradientTransformationExtraArgs:
    """Its update takes `step=state.step`, as the schedule keeps no counter of its own, and the gradient's `norm` where
    that is known; lbfgs also takes the `value` and `grad` of the objective at the parameters, and the objective itself
    as `value_fn`.
    """
    optimizer = lbfgs.direction() if config.optimizer == "lbfgs" else _scheduled(config)
    if rules.any_frozen(config):
        kinds = {"trained": optimizer, "frozen": optax.set_to_zero()}
        optimizer = optax.partition(kinds, lambda tree: rules.label_frozen(tree, config))
    if config.optimizer == "lbfgs":
        optimizer = chain(optimizer, lbfgs.line_search())  # of the whole objective, so outside any mask

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts; our own code is strict
            return optimizer.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def state_specs(optimizer: optax.GradientTransformation, parameters, specs):
    """PartitionSpecs of the optimizer's state: what is kept of a parameter is split as it is, counters are not."""

    def spec_of(leaf, spec, parameter):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return P(*[None] * (leaf.ndim - parameter.ndim), *spec)  # a history leads with an axis of its own

    return optax.tree_map_params(
        optimizer,
        spec_of,
        jax.eval_shape(optimizer.init, parameters),
        specs,
        parameters,
        transform_non_params=lambda _: P(),
        is_leaf=lambda node: isinstance(node, optax.MaskedNode),
    )


def _scheduled(config: Config) -> optax.GradientTransformationExtraArgs:
    return chain(
        _clip_by_norm(config.clip) if config.clip else optax.identity(),
        scale_by_muon(config) if config.optimizer == "muon" else optax.scale_by_adam(config.beta1, config.beta2),
        optax.add_decayed_weights(config.weight_decay, mask=_decayed),
        _scale_by_rate_at_step(config),
    )


def _clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """`optax.clip_by_global_norm` that is told the norm; a factor, unlike its quotient, is fused into what follows."""

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _decayed(parameters):
    return name_patterns.map_names(lambda name: is_decayed(name.rpartition("/")[2]), parameters)


def is_decayed(leaf: str) -> bool:
    return leaf in DECAYED or lora.is_adapter(leaf)


def _scale_by_rate_at_step(config: Config) -> optax.GradientTransformationExtraArgs:
    schedule = learning_rate(config)

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u, factor: -rate * factor * u, updates, rules.rate_factors(updates, config)), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)
