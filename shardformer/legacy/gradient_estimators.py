"""optax's estimators of the gradient of an expectation, and its control variates, which optax 0.2.7 dropped.

A sample is taken with `dist.sample(shape, key)`: the keyword was `seed`, and is `key` in today's optax.multi_normal.

A function accepts a sample and returns a number; `dist_builder(*params)` returns a distribution with `sample` and
`log_prob`. An estimate has a row for each sample: [num_samples, ...] for each of `params`.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

Function = Callable[[jax.Array], Any]


def score_function_jacobians(function: Function, params, dist_builder: Callable, rng, num_samples: int):
    """Returns f(x) times the gradient of log p(x), for each sample."""

    def weighted_log_probabilities(params):
        dist = dist_builder(*params)
        samples = jax.lax.stop_gradient(dist.sample((num_samples,), rng))
        return jax.vmap(lambda x: function(x) * dist.log_prob(x))(samples)

    return jax.jacfwd(weighted_log_probabilities)(params)


def pathwise_jacobians(function: Function, params, dist_builder: Callable, rng, num_samples: int):
    """Returns the gradient of f(x) through the sampling of x, for each sample."""

    def values(params):
        return jax.vmap(function)(dist_builder(*params).sample((num_samples,), rng))

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


def measure_valued_jacobians(
    function: Function, params, dist_builder: Callable, rng, num_samples: int, coupling: bool = True
):
    """Returns the measure-valued estimates for the mean and the log of the scale of `optax.multi_normal`."""
    if dist_builder is not optax.multi_normal:
        raise ValueError("measure_valued_jacobians takes optax.multi_normal as its dist_builder")
    mean, scale = params[0], jnp.exp(params[1])
    samples = dist_builder(*params).sample((num_samples,), rng)
    rng, other_rng = jax.random.split(rng)
    shape = samples.shape

    above = jax.random.weibull_min(rng, math.sqrt(2.0), 2.0, shape)
    below = above if coupling else jax.random.weibull_min(other_rng, math.sqrt(2.0), 2.0, shape)
    of_mean = _difference(function, samples, mean + scale * above, mean - scale * below)

    outer = jax.random.double_sided_maxwell(rng, 0.0, 1.0, shape)
    inner = jax.random.uniform(other_rng, shape) * outer if coupling else jax.random.normal(other_rng, shape)
    of_scale = _difference(function, samples, mean + scale * outer, mean + scale * inner)
    return [of_mean / (math.sqrt(2 * math.pi) * scale), of_scale]


def _difference(function: Function, samples: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    """Returns f(x with one number of `first`) - f(x with that of `second`) for each sample and number: [N, D]."""

    def value(x, number, position):
        return function(x.at[position].set(number))

    over_positions = jax.vmap(value, in_axes=(None, 0, 0))
    over_samples = jax.vmap(over_positions, in_axes=(0, 0, None))
    positions = jnp.arange(samples.shape[1])
    return over_samples(samples, first, positions) - over_samples(samples, second, positions)


def control_variates_jacobians(
    function: Function,
    control_variate_from_function: Callable,
    grad_estimator: Callable,
    params,
    dist_builder: Callable,
    rng,
    num_samples: int,
    control_variate_state=None,
    estimate_cv_coeffs: bool = False,
    estimate_cv_coeffs_num_samples: int = 20,
):
    """Returns the estimates less those of the control variate plus its exact gradient, and the variate's new state."""
    value, expected_value, update = control_variate_from_function(function)
    coefficients: list = [1.0] * len(params)
    if estimate_cv_coeffs:
        new_samples = params, dist_builder, jax.random.split(rng)[0], estimate_cv_coeffs_num_samples
        estimates = grad_estimator(lambda x: value(params, x, control_variate_state), *new_samples)
        pairs = zip(estimates, grad_estimator(function, *new_samples), strict=True)
        coefficients = [_least_variance(*pair) for pair in pairs]
    of_function = grad_estimator(function, params, dist_builder, rng, num_samples)
    # The same key repeats the samples of the estimate.
    samples = dist_builder(*params).sample((num_samples,), rng)
    state = update(params, samples, control_variate_state)

    def at_fixed_parameters(x):
        return value(jax.lax.stop_gradient(params), x, state)

    def mean_value(params):
        return jnp.mean(jax.vmap(lambda x: value(params, x, state))(jax.lax.stop_gradient(samples)))

    of_variate = grad_estimator(at_fixed_parameters, params, dist_builder, rng, num_samples)
    direct = jax.grad(mean_value)(params)
    exact = jax.grad(expected_value)(params, state)
    parts = zip(of_function, of_variate, direct, exact, coefficients, strict=True)
    return [f - c * (v + d) + c * e for f, v, d, e, c in parts], state


def _least_variance(of_variate: jax.Array, of_function: jax.Array, eps: float = 1e-3) -> jax.Array:
    """Returns the coefficient of the control variate that leaves the least variance."""
    centred = of_variate - jnp.mean(of_variate, axis=0)
    covariance = jnp.mean((of_function - jnp.mean(of_function, axis=0)) * centred, axis=0)
    return jax.lax.stop_gradient(jnp.sum(covariance) / (jnp.sum(jnp.var(of_variate, axis=0)) + eps))
