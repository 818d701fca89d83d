"""Accumulation by optax.MultiSteps: the optimizer is called for every microbatch, and updates at the last."""

import jax
import optax


def accumulate_over_calls(optimizer: optax.GradientTransformationExtraArgs, count: int):
    """Wraps the optimizer to update by the mean of `count` gradients; its updates before the last are zero."""
    steps = optax.MultiSteps(optimizer, every_k_schedule=count)

    def update(updates, state, params=None, **extra):
        with jax.numpy_dtype_promotion("standard"):  # optax divides by integer counts; our own code is strict
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
