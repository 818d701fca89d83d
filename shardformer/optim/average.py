"""An exponential moving average of the weights: often a better model than the last step's, at no cost to training."""

import jax
import jax.numpy as jnp

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.optim import names
from shardformer.shards import lora


def of(parameters: dict, config: Config) -> dict:
    """The parameters that are averaged, by name: of those that learn; nothing without ema."""
    if not config.ema:
        return {}
    chosen = {
        module: {name: p for name, p in leaves.items() if names.matches(config.ema_names, f"{module}/{name}")}
        for module, leaves in lora.learned(parameters, config).items()
    }
    return {module: leaves for module, leaves in chosen.items() if leaves}


def check(parameters: dict, config: Config) -> None:
    if config.ema and not of(parameters, config):
        every = [names.of(path) for path, _ in jax.tree.leaves_with_path(lora.learned(parameters, config))]
        closest = ", ".join(names.closest(config.ema_names, every))
        raise UsageError(f"ema_names={config.ema_names} matches no parameter that learns; the closest are {closest}")


def initial(parameters: dict, config: Config) -> dict:
    return jax.tree.map(jnp.zeros_like, of(parameters, config))


def updated(average: dict, parameters: dict, config: Config) -> dict:
    """As a difference, whose fixed point is exact: in float32 a decay and its complement do not add up to one."""
    return jax.tree.map(lambda a, p: a + (1 - config.ema) * (p - a), average, of(parameters, config))


def read(average: dict, parameters: dict, steps: int, config: Config) -> dict:
    """The parameters with those that are averaged in place of the last. Zeros at its start weigh ema ** steps of it."""
    if not steps:
        return parameters
    weight = 1 - config.ema**steps
    return {
        module: leaves | {name: p / weight for name, p in average.get(module, {}).items()}
        for module, leaves in parameters.items()
    }
