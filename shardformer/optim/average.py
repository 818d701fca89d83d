"""An exponential moving average of the weights: often a better model than the last step's."""

import math

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.model import lora
from shardformer.optim import name_patterns, rules


def select_averaged(parameters: dict, config: Config) -> dict:
    """The parameters that are averaged: those that learn and match ema_names; none without ema."""
    if not config.ema:
        return {}
    learned = lora.select_learned(parameters, config)
    factors = rules.rate_factors(learned, config)
    averaged = lambda module, name: (
        factors[module][name] and name_patterns.matches(config.ema_names, f"{module}/{name}")
    )
    chosen = {
        module: {name: p for name, p in leaves.items() if averaged(module, name)} for module, leaves in learned.items()
    }
    return {module: leaves for module, leaves in chosen.items() if leaves}


def check_names(parameters: dict, config: Config) -> None:
    if config.ema and not select_averaged(parameters, config):
        names = name_patterns.full_names(select_averaged(parameters, config.replace(ema_names="*")))
        closest = ", ".join(name_patterns.closest(config.ema_names, names)) or "none, as lr_rules freezes all"
        raise UsageError(f"ema_names={config.ema_names} matches no parameter that learns; the closest are {closest}")


def start_average(parameters: dict, config: Config) -> dict:
    """A copy of the parameters; the first step replaces it."""
    return jax.tree.map(jnp.copy, select_averaged(parameters, config))


def update_average(average: dict, parameters: dict, step, config: Config) -> dict:
    """Adds the parameters after step `step` (from 0); the weights of all steps so far add up to one.

    A weighted difference is added, so that a parameter that does not move stays exact.
    """
    if not config.ema:
        return {}
    so_far = -jnp.expm1((step + 1).astype(jnp.float32) * math.log(config.ema))  # 1 - ema ** (step + 1)
    weight = (1 - config.ema) / so_far
    return jax.tree.map(lambda a, p: a + weight * (p - a), average, select_averaged(parameters, config))


def replace_by_average(average: dict, parameters: dict, steps: int) -> dict:
    """The parameters with the averages in place of the last values; before the first step, as they are."""
    return lora.replace_learned(parameters, average) if steps else parameters
