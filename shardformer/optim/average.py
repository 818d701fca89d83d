"""An exponential moving average of the weights, which is often a better model than the last weights."""

import functools
import math

import jax
import jax.numpy as jnp

from shardformer.adapters.adapter_keys import replace_trainable, select_trainable
from shardformer.config import Config
from shardformer.model import master_weights


def select_averaged(parameters: dict, config: Config) -> dict:
    """Returns the averaged parameters: the trainable ones that lr_rules does not freeze; none without ema."""
    if not config.training.ema:
        return {}
    trainable = select_trainable(parameters, config)
    if not config.optimizer.lr_rules:
        return trainable
    from shardformer.optim import rules  # not imported without lr_rules

    return rules.drop_frozen(trainable, config)


def start_average(parameters: dict, config: Config) -> dict:
    """Copies the averaged parameters; the first step replaces the copy."""
    return jax.tree.map(jnp.copy, select_averaged(parameters, config))


def update_average(average: dict, parameters: dict, step, config: Config) -> dict:
    """Adds the parameters after step `step` (from 0). The weights of all steps so far sum to one.

    Adds a weighted difference, so that the average of a constant parameter is exact.
    """
    so_far = -jnp.expm1((step + 1).astype(jnp.float32) * math.log(config.training.ema))  # 1 - ema ** (step + 1)
    weight = (1 - config.training.ema) / so_far
    return jax.tree.map(lambda a, p: a + weight * (p - a), average, select_averaged(parameters, config))


def replace_by_average(average: dict, parameters: dict, steps: int, config: Config) -> dict:
    """Replaces parameters by their averages, rounded as the run stores them; before the first step, returns them."""
    if not steps:
        return parameters
    means = replace_trainable(parameters, average)
    return _round(means, steps, config) if master_weights.are_rounded(config) else means


@functools.partial(jax.jit, static_argnums=2)
def _round(parameters: dict, steps, config: Config) -> dict:
    """Rounds parameters in one program; operation by operation, JAX would compile more than 200."""
    return master_weights.round_parameters(parameters, config, steps)
