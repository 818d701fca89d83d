"""The optimizer: clipping by the global norm, a direction, decoupled decay of matrices, the schedule's rate."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import tree_util
from jax.sharding import PartitionSpec as P
from optax.transforms import chain  # while shardformer.legacy is installed, optax.chain is replaced

from shardformer.config import Config
from shardformer.config.names import EXPERT_MATRICES, MATRICES, SHARED_MATRICES
from shardformer.optim import lbfgs, moments, rules
from shardformer.optim.muon import scale_by_muon
from shardformer.optim.schedule import learning_rate

# By name, because a stacked bias has the shape of a matrix.
DECAYED = {"tokens", *MATRICES, *EXPERT_MATRICES, *SHARED_MATRICES, "router", "w"}


def make_optimizer(config: Config, map_matrices: Callable = jax.tree.map) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer. Its update needs `step=state.step`, because the schedule keeps no counter.

    The update also accepts the gradient's `norm`, if it is known; for lbfgs see `lbfgs.search_arguments`.
    `map_matrices` applies a function of full matrices to a tree of stacked ones; see `Model.map_matrices`.
    """
    optimizer = lbfgs.direction() if config.optimizer.name == "lbfgs" else _scheduled(config, map_matrices)
    if config.moves_router_bias:
        from shardformer.optim.router_bias import add_bias_update  # not imported without experts

        optimizer = add_bias_update(optimizer, config)
    if rules.any_frozen(config):  # outside the update of biases, which may be frozen too
        by_label = {"trained": optimizer, "frozen": optax.set_to_zero()}
        optimizer = optax.partition(by_label, lambda tree: rules.label_frozen(tree, config))
    if config.optimizer.name == "lbfgs":
        optimizer = chain(optimizer, lbfgs.line_search())  # outside any mask: it evaluates the full objective
    if config.optimizer.moment_dtype != "float32":
        optimizer = moments.store_in_bfloat16(optimizer, config.training.seed)
    if config.training.accum_mode == "multisteps":  # with accum=1 too, because accum may change on resume
        optimizer = accumulate_over_calls(optimizer, config.training.accum)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts; our code is strict
            return optimizer.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def state_specs(optimizer: optax.GradientTransformation, parameters, specs):
    """Returns the PartitionSpecs of the optimizer's state: a parameter's arrays are split as it is, counters not."""

    def spec_of(leaf, spec, parameter):
        if isinstance(leaf, optax.MaskedNode):
            return leaf
        return P(*[None] * (leaf.ndim - parameter.ndim), *spec)  # a history has a leading axis more

    def find() -> None:
        result.append(
            optax.tree_map_params(
                optimizer,
                spec_of,
                jax.eval_shape(optimizer.init, parameters),
                specs,
                parameters,
                transform_non_params=lambda _: P(),
                is_leaf=lambda node: isinstance(node, optax.MaskedNode),
            )
        )

    result: list = []
    jax.eval_shape(find)  # optax makes counters, for each of which JAX would compile a program outside of a trace
    return result[0]


def _scheduled(config: Config, map_matrices: Callable) -> optax.GradientTransformationExtraArgs:
    adam = optax.scale_by_adam(config.optimizer.beta1, config.optimizer.beta2)
    return chain(
        _clip_by_norm(config.optimizer.clip) if config.optimizer.clip else optax.identity(),
        scale_by_muon(adam, map_matrices) if config.optimizer.name == "muon" else adam,
        optax.add_decayed_weights(
            config.optimizer.weight_decay, mask=_select_all if config.lora.lora_rank else _select_decayed
        ),
        _scale_by_rate_at_step(config),
    )


def _clip_by_norm(limit: float) -> optax.GradientTransformationExtraArgs:
    """Clips as `optax.clip_by_global_norm`, by a given norm.

    Multiplies by a factor, which XLA fuses into the operations that follow; optax's quotient is not fused.
    """

    def update(updates, state, params=None, *, norm=None, **_):
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.where(norm < limit, 1.0, limit / norm)
        return jax.tree.map(lambda u: u * factor.astype(u.dtype), updates), state

    return optax.GradientTransformationExtraArgs(lambda _: optax.EmptyState(), update)


def _select_decayed(parameters):
    return tree_util.tree_map_with_path(lambda path, _: is_decayed(path[-1].key), parameters)


def is_decayed(leaf: str) -> bool:
    """Returns whether weight decay applies to a leaf of this name."""
    return leaf in DECAYED


def _select_all(adapters):
    return jax.tree.map(lambda _: True, adapters)


def _scale_by_rate_at_step(config: Config) -> optax.GradientTransformationExtraArgs:
    schedule = learning_rate(config)

    def update(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u: -rate * u, updates), state

    def update_by_rules(updates, state, params=None, *, step, **_):
        rate = schedule(step)
        return jax.tree.map(lambda u, factor: -rate * factor * u, updates, rules.rate_factors(updates, config)), state

    return optax.GradientTransformationExtraArgs(
        lambda _: optax.EmptyState(), update_by_rules if config.optimizer.lr_rules else update
    )


def accumulate_over_calls(optimizer: optax.GradientTransformationExtraArgs, count: int):
    """Wraps the optimizer to update by the mean of `count` gradients; its updates before the last are zero."""
    steps = optax.MultiSteps(optimizer, every_k_schedule=count)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax divides by integer counts; our code is strict
            return steps.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(steps.init, update)


def reset_accumulation(state: optax.MultiStepsState) -> optax.MultiStepsState:
    """Removes the gradients of an unfinished step from the state."""
    mini_step, acc_grads = jax.tree.map(jax.numpy.zeros_like, (state.mini_step, state.acc_grads))
    return state._replace(mini_step=mini_step, acc_grads=acc_grads)


def mean_gradient(state: optax.MultiStepsState, grads):
    """Returns the mean of the gradients since the last update, including `grads`."""
    count = (state.mini_step + 1).astype("float32")
    return jax.tree.map(lambda mean, g: mean + (g - mean) / count, state.acc_grads, grads)
