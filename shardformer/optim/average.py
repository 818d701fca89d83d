"""An exponential moving average of the weights, which is often a better model than the last weights."""

import math

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.model import lora
from shardformer.optim import name_patterns, rules


def select_averaged(parameters: dict, config: Config) -> dict:
    """Returns the averaged parameters: the trained ones that match ema_names; none without ema."""
    if not config.ema:
        return {}
    trainable = lora.select_learned(parameters, config)
    factors = rules.rate_factors(trainable, config)

    def is_averaged(module: str, name: str) -> bool:
        return factors[module][name] and name_patterns.matches(config.ema_names, f"{module}/{name}")

    chosen = {
        module: {name: p for name, p in leaves.items() if is_averaged(module, name)}
        for module, leaves in trainable.items()
    }
    return {module: leaves for module, leaves in chosen.items() if leaves}


def check_names(parameters: dict, config: Config) -> None:
    """Raises UsageError if ema_names matches no trained parameter."""
    if config.ema and not select_averaged(parameters, config):
        names = name_patterns.full_names(select_averaged(parameters, config.replace(ema_names="*")))
        closest = ", ".join(name_patterns.closest(config.ema_names, names)) or "none, as lr_rules freezes all"
        raise UsageError(f"ema_names={config.ema_names} matches no trained parameter; the closest are {closest}")


def start_average(parameters: dict, config: Config) -> dict:
    """Copies the averaged parameters; the first step replaces the copy."""
    return jax.tree.map(jnp.copy, select_averaged(parameters, config))


def update_average(average: dict, parameters: dict, step, config: Config) -> dict:
    """Adds the parameters after step `step` (from 0). The weights of all steps so far sum to one.

    Adds a weighted difference, so that the average of a constant parameter is exact.
    """
    if not config.ema:
        return {}
    so_far = -jnp.expm1((step + 1).astype(jnp.float32) * math.log(config.ema))  # 1 - ema ** (step + 1)
    weight = (1 - config.ema) / so_far
    return jax.tree.map(lambda a, p: a + weight * (p - a), average, select_averaged(parameters, config))


def replace_by_average(average: dict, parameters: dict, steps: int) -> dict:
    """Replaces parameters by their averages; before the first step, returns them unchanged."""
    return lora.replace_learned(parameters, average) if steps else parameters
