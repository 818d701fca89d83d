"""The optimizer of a run: clipping by the global norm, one of `optimizers.py` or of the user, and its wrappers."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import tree_util
from jax.sharding import PartitionSpec as P
from optax.transforms import chain  # while shardformer.legacy is installed, optax.chain is replaced

from shardformer.config import Config
from shardformer.config.names import ALL_MATRICES, PREFIX
from shardformer.config.registries import call_with
from shardformer.optim.optimizers import OPTIMIZERS
from shardformer.optim.schedule import learning_rate

# By name, because a stacked bias has the shape of a matrix.
DECAYED = {"tokens", "previous", "project", *ALL_MATRICES, "router", "w"}


def make_optimizer(config: Config, map_matrices: Callable = jax.tree.map) -> optax.GradientTransformationExtraArgs:
    """Makes the optimizer. Its update needs `step=state.step`, because the schedule keeps no counter.

    The update also accepts the gradient's `norm`, if it is known; for lbfgs see `lbfgs.search_arguments`.
    `map_matrices` applies a function of full matrices to a tree of stacked ones; see `Model.map_matrices`.
    """
    optimizer = _choose_optimizer(config, list_inputs(config, map_matrices))
    if config.optimizer.clip:
        optimizer = _clip_by_norm(optimizer, config.optimizer.clip)
    if config.mixture.moves_router_bias:
        from shardformer.experts.router_bias import add_bias_update  # not imported without experts

        optimizer = add_bias_update(optimizer, config)
    if config.optimizer.lr_rules:
        from shardformer.optim import rules  # not imported without lr_rules

        if rules.any_frozen(config):  # outside the update of biases, which may be frozen too
            by_label = {"trained": optimizer, "frozen": optax.set_to_zero()}
            optimizer = optax.partition(by_label, lambda tree: rules.label_frozen(tree, config))
    if config.optimizer.searches_rate:
        from shardformer.optim import lbfgs  # not imported for other optimizers

        optimizer = chain(optimizer, lbfgs.line_search())  # outside any mask: it evaluates the full objective
    if config.optimizer.moment_dtype != "float32":
        from shardformer.optim import moments  # not imported for moments in float32

        optimizer = moments.store_in_bfloat16(optimizer, config.training.seed)
    if config.training.accum_mode == "multisteps":  # with accum=1 too, because accum may change on resume
        optimizer = accumulate_over_calls(optimizer, config.training.accum)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax raises floats to integer counts; our code is strict
            return optimizer.update(updates, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def list_inputs(config: Config, map_matrices: Callable = jax.tree.map) -> dict:
    """Returns what an optimizer may ask for by its parameters' names.

    keys: the group of keys with lr, beta1, beta2, weight_decay and the others.
    rate: the learning rate as a function of the number of updates, from 0.
    scale_by_rate: a transformation that multiplies by -rate of the run's step, and by the factors of lr_rules.
    decay_mask: returns for a tree of parameters a tree that is True where weight_decay applies.
    scale_to_size: wraps a transformation of gradients, so that its updates have the size that scale= asks for.
    map_matrices: see `make_optimizer`.
    """
    return {
        "keys": config.optimizer,
        "rate": learning_rate(config),
        "scale_by_rate": _scale_by_rate_at_step(config),
        "scale_to_size": functools.partial(_scale_to_size, config),
        "decay_mask": _select_all if config.lora.lora_rank else _select_decayed,
        "map_matrices": map_matrices,
    }


def _scale_to_size(config: Config, scaled: optax.GradientTransformation, power: float) -> optax.GradientTransformation:
    if not config.model.scale:
        return scaled
    from shardformer.optim.completep import scale_to_size  # not imported without scale=

    return scale_to_size(scaled, config.model.size_ratio, power)


def _choose_optimizer(config: Config, inputs: dict) -> optax.GradientTransformationExtraArgs:
    if config.optimizer.is_code:
        from shardformer.optim.own_optimizer import make_own_optimizer  # not imported for built-in ones

        return make_own_optimizer(config.optimizer.name, inputs)
    return call_with(OPTIMIZERS[config.optimizer.name], inputs)


def state_specs(optimizer: optax.GradientTransformation, parameters: dict, specs: dict):
    """Returns the PartitionSpecs of the optimizer's state.

    An array whose path ends with a parameter's is split as the parameter is, if it has its shape, or its shape after
    the leading axis of a history. All others are replicated, such as counters and adafactor's means of rows.
    """
    shape_of = {path: leaf.shape for path, leaf in tree_util.tree_leaves_with_path(parameters)}
    spec_of = dict(tree_util.tree_leaves_with_path(specs))

    def find_spec(path, leaf):
        name = path[-2:]  # a module and its parameter
        axes = leaf.ndim - len(shape_of.get(name, ()))
        if name not in shape_of or axes < 0 or leaf.shape[axes:] != shape_of[name]:
            return P()
        return P(*[None] * axes, *spec_of[name])

    return tree_util.tree_map_with_path(find_spec, jax.eval_shape(optimizer.init, parameters))


def _clip_by_norm(optimizer: optax.GradientTransformationExtraArgs, limit: float):
    """Clips the gradient as `optax.clip_by_global_norm`, by a given norm, in front of an optimizer.

    Multiplies by a factor, which XLA fuses into the operations that follow; optax's quotient is not fused.
    """

    def update(updates, state, params=None, *, norm=None, **extra):
        norm = optax.tree.norm(updates) if norm is None else norm
        factor = jnp.where(norm < limit, 1.0, limit / norm)
        clipped = jax.tree.map(lambda u: u * factor.astype(u.dtype), updates)
        return optimizer.update(clipped, state, params, **extra)

    return optax.GradientTransformationExtraArgs(optimizer.init, update)


def _select_decayed(parameters):
    """Returns True for matrices: by name for the language model's, whose biases are stacked, else by dimensions."""

    def is_matrix(path, leaf) -> bool:
        return is_decayed(path[-1].key) if path[0].key.startswith(PREFIX) else leaf.ndim > 1

    return tree_util.tree_map_with_path(is_matrix, parameters)


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
        from shardformer.optim import rules

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
