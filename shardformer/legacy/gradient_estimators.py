"""optax's estimators of the gradient of an expectation, and its control variates, which optax 0.2.7 dropped.

A function takes a sample and returns a number; `dist_builder(*params)` returns a distribution with `sample` and
`log_prob`. An estimate has a row for each sample: [num_samples, ...] for each of `params`.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Function = Callable[[jax.Array], Any]


def score_function_jacobians(function: Function, params, dist_builder: Callable, rng, num_samples: int):
    """Returns f(x) times the gradient of log p(x), for each sample."""

    def weighted_log_probabilities(params):
        dist = dist_builder(*params)
        samples = jax.lax.stop_gradient(dist.sample((num_samples,), seed=rng))
        return jax.vmap(lambda x: function(x) * dist.log_prob(x))(samples)

    return jax.jacfwd(weighted_log_probabilities)(params)


def pathwise_jacobians(function: Function, params, dist_builder: Callable, rng, num_samples: int):
    """Returns the gradient of f(x) through the sampling of x, for each sample."""

    def values(params):
        return jax.vmap(function)(dist_builder(*params).sample((num_samples,), seed=rng))

    return jax.jacfwd(values)(params)


def control_delta_method(function: Function):
    """Returns the functions of a control variate: the value, the expected value, and the update of the state.

    The control variate is the Taylor expansion of order two at the mean; `params` is (mean, log of the scale).
    """

    def value(params, sample, state=None):
        mean = params[0]
        offset = sample - mean
        curvature = offset @ jax.hessian(function)(mean) @ offset
        return function(mean) + offset @ jax.grad(function)(mean) + curvature / 2

    def expected_value(params, state):
        mean, log_scale = params
        variances = jnp.exp(log_scale) ** 2
        return function(mean) + jnp.sum(variances * jnp.diag(jax.hessian(function)(mean))) / 2

    def update(params, samples, state=None):
        return state

    return value, expected_value, update


def moving_avg_baseline(
    function: Function, decay: float = 0.99, zero_debias: bool = True, use_decay_early_training_heuristic: bool = True
):
    """Returns the functions of a control variate as `control_delta_method` does; its state is (average, steps)."""

    def value(params, samples, state=None):
        return state[0]

    def expected_value(params, state):
        return state[0]

    def update(params, samples, state):
        average, steps = state
        rate = jnp.minimum(decay, (1.0 + steps) / (10.0 + steps)) if use_decay_early_training_heuristic else decay
        average = rate * average + (1 - rate) * jnp.mean(jax.vmap(function)(samples))
        if zero_debias:
            average /= 1 - jnp.power(rate, steps + 1)
        return jax.lax.stop_gradient(average), steps + 1

    return value, expected_value, update
