"""Writes goldens/estimators.json: `python tests/legacy/record_estimators.py`, with optax 0.1.5 and jax 0.4.13."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np


class Normal:
    """A normal distribution with fixed draws, which no release of jax changes."""

    def __init__(self, mean, log_scale):
        self.mean, self.scale = mean, jnp.exp(log_scale)

    def sample(self, shape, seed):
        return self.mean + self.scale * jnp.asarray(np.random.RandomState(seed).randn(*shape, 2), jnp.float32)

    def log_prob(self, x):
        return jnp.sum(-(((x - self.mean) / self.scale) ** 2) / 2 - jnp.log(self.scale))


def function(x):
    return jnp.sum(x**3) + x[0] * x[1]


def estimates(optax) -> dict[str, list]:
    """Returns the numbers of each estimator and control variate."""
    params = (jnp.array([0.5, -1.0]), jnp.array([0.1, -0.3]))
    samples = Normal(*params).sample((3,), 7)
    found = {}
    for name in ("score_function_jacobians", "pathwise_jacobians"):
        found[name] = getattr(optax, name)(function, params, Normal, 7, 3)
    value, expected, update = optax.control_delta_method(function)
    gradient = jax.grad(expected)(params, None)
    found["control_delta_method"] = [jax.vmap(lambda x: value(params, x))(samples), expected(params, None), gradient]
    for name, options in {"debiased": {}, "plain": {"decay": 0.5, "zero_debias": False},
                          "constant": {"use_decay_early_training_heuristic": False}}.items():  # fmt: skip
        value, expected, update = optax.moving_avg_baseline(function, **options)
        state = update(params, samples, update(params, samples, (jnp.zeros(()), 0)))
        found[f"moving_avg_baseline, {name}"] = [state, value(params, samples, state), expected(params, state)]
    found |= _of_multi_normal(optax, params)
    return {name: [np.asarray(x).tolist() for x in jax.tree_util.tree_leaves(each)] for name, each in found.items()}


def _of_multi_normal(optax, params) -> dict[str, list]:
    """Returns the estimates that draw with jax.random, whose draws jax_threefry_partitionable=False fixes."""
    jax.config.update("jax_threefry_partitionable", False)
    key = jax.random.PRNGKey(3)
    found = {}
    for coupling in (True, False):
        found[f"measure_valued_jacobians, coupling={coupling}"] = optax.measure_valued_jacobians(
            function, params, optax.multi_normal, key, 4, coupling
        )
    delta, average = optax.control_delta_method, optax.moving_avg_baseline
    for name, variate, state, estimate in (
        ("delta", delta, None, False), ("delta, coefficients", delta, None, True),
        ("average", average, (jnp.zeros(()), 0), False), ("average, coefficients", average, (jnp.ones(()), 2), True),
    ):  # fmt: skip
        for estimator in ("score_function_jacobians", "pathwise_jacobians"):
            found[f"control_variates_jacobians, {name}, {estimator}"] = optax.control_variates_jacobians(
                function, variate, getattr(optax, estimator), params, optax.multi_normal, key, 4, state, estimate, 5
            )
    return found


if __name__ == "__main__":
    import optax

    text = json.dumps(estimates(optax), indent=1)
    (Path(__file__).parent / "goldens" / "estimators.json").write_text(text + "\n")
