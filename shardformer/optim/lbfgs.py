"""L-BFGS: a direction from the gradients of the last steps, and a line search for the step size."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax.transforms import chain  # see chain.py

MEMORY = 10  # steps remembered; each costs two copies of the parameters, and books advise 3 to 20
TRIALS = 20  # of the line search in a step, each of them a loss and a gradient; most steps need one or two


class LineSearchState(NamedTuple):
    """What the last search found: for the log alone, as each search starts afresh at 1."""

    step_size: jax.Array
    trials: jax.Array


def direction() -> optax.GradientTransformationExtraArgs:
    """Downhill, as far as the curvature of the last steps suggests."""
    return chain(optax.scale_by_lbfgs(MEMORY), optax.scale(-1.0))


def line_search() -> optax.GradientTransformationExtraArgs:
    """optax's zoom search; the gradient that it keeps is dropped, as the next batch is another objective."""
    search = optax.scale_by_zoom_linesearch(max_linesearch_steps=TRIALS, initial_guess_strategy="one")

    def update(updates, _, params, *, value, grad, value_fn, **_unused):
        start = search.init(params)
        updates, found = search.update(updates, start, params, value=value, grad=grad, value_fn=value_fn)
        return updates, LineSearchState(found.learning_rate, found.info.num_linesearch_steps)

    start = lambda _: LineSearchState(jnp.float32(1), jnp.int32(0))
    return optax.GradientTransformationExtraArgs(start, update)


def step_size(state, otherwise):
    """How far the last step of an optimizer's state went along its direction; `otherwise` if it had no line search."""
    return optax.tree.get(state, "step_size", otherwise)
