"""An exponential moving average of the weights: often a better model than the last step's, at no cost to training."""

import fnmatch

import jax
import jax.numpy as jnp
import optax

from shardformer.config import Config


def of(parameters: dict, config: Config) -> dict:
    """The parameters that are averaged, by name; nothing without ema."""
    if not config.ema:
        return {}
    chosen = {
        module: {name: p for name, p in leaves.items() if fnmatch.fnmatchcase(f"{module}/{name}", config.ema_names)}
        for module, leaves in parameters.items()
    }
    return {module: leaves for module, leaves in chosen.items() if leaves}


def initial(parameters: dict, config: Config) -> dict:
    return jax.tree.map(jnp.zeros_like, of(parameters, config))


def updated(average: dict, parameters: dict, config: Config) -> dict:
    return optax.incremental_update(of(parameters, config), average, 1 - config.ema)


def read(average: dict, parameters: dict, steps, config: Config) -> dict:
    """The parameters with those that are averaged in place of the last. Zeros at its start weigh ema ** steps of it."""
    weight = 1 - jnp.float32(config.ema) ** steps
    return {
        module: leaves | {name: p / weight for name, p in average.get(module, {}).items()}
        for module, leaves in parameters.items()
    }
