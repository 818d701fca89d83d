"""L-BFGS: a direction from the gradients of recent steps, and a line search for the step size."""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.transforms import chain  # see chain.py

from shardformer.config import Config
from shardformer.model import Loss

MEMORY = 10  # steps in the history, each with two copies of the parameters; books advise 3 to 20
TRIALS = 20  # most evaluations of loss and gradient in one line search; most steps need one or two


class LineSearchState(NamedTuple):
    """The result of the last search, only for the log: each search starts at 1."""

    step_size: jax.Array
    trials: jax.Array


def direction() -> optax.GradientTransformationExtraArgs:
    """Makes the descent direction by the curvature of recent steps."""
    return chain(optax.scale_by_lbfgs(MEMORY), optax.scale(-1.0))


def line_search() -> optax.GradientTransformationExtraArgs:
    """Makes optax's zoom search, without the gradient it keeps: the next batch has another objective."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=TRIALS, initial_guess_strategy="one")

    def update(updates, _, params, *, value, grad, value_fn, **_unused):
        start = search.init(params)
        updates, result = search.update(updates, start, params, value=value, grad=grad, value_fn=value_fn)
        return updates, LineSearchState(result.learning_rate, result.info.num_linesearch_steps)

    return optax.GradientTransformationExtraArgs(lambda _: LineSearchState(jnp.float32(1), jnp.int32(0)), update)


def search_arguments(objective: Callable, losses: Loss, grads, config: Config) -> dict:
    """Returns the optimizer's arguments: the objective as a function of the parameters, its value and its gradient."""
    return {"value_fn": objective, "value": losses.loss + config.training.z_loss * losses.z_loss, "grad": grads}


def step_size(state):
    """Returns the step size of the state's last line search."""
    return optax.tree.get(state, "step_size")
