"""The learning rate: a linear warm-up, then the shape that schedule= names."""

import jax
import jax.numpy as jnp
import optax

from shardformer.config import Config


def decay_end(config: Config) -> int:
    """Returns the step from which the rate is lr_min."""
    return config.decay_steps or config.steps


def warmup_steps(config: Config) -> int:
    """Returns the length of the warm-up, which leaves a decay at least one step."""
    if config.schedule == "constant":
        return config.warmup
    return min(config.warmup, max(decay_end(config) - 1, 0))


def learning_rate(config: Config) -> optax.Schedule:
    """Returns the learning rate as a function of `state.step`; 0 is the first step."""
    warmup = warmup_steps(config)
    schedule = _after_warmup(config, max(decay_end(config) - warmup, 1))
    if warmup:
        # The first step's rate is lr / warmup rather than zero, so that it trains too.
        rising = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
        schedule = optax.join_schedules([rising, schedule], [warmup])

    def rate(step):
        with jax.numpy_dtype_promotion("standard"):  # optax divides integer steps; our own code is strict
            return jnp.float32(schedule(step))

    return rate


def _after_warmup(config: Config, steps: int) -> optax.Schedule:
    """Returns the rate as a function of the steps after the warm-up; it reaches lr_min after `steps` of them."""
    lowest = min(config.lr_min, config.lr)  # a small lr= on the command line must not climb to the preset's lr_min
    if config.schedule == "constant":
        return optax.constant_schedule(config.lr)
    if config.schedule == "linear":
        return optax.linear_schedule(config.lr, lowest, steps)
    if config.schedule == "wsd":
        decay = min(config.decay or max(decay_end(config) // 10, 1), steps)
        return optax.linear_schedule(config.lr, lowest, decay, transition_begin=steps - decay)
    return optax.cosine_decay_schedule(config.lr, steps, alpha=lowest / config.lr if config.lr else 0.0)
