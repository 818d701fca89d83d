"""The learning rate: a linear warm-up, then a cosine down to lr_min."""

import jax
import jax.numpy as jnp
import optax

from shardformer.config import Config


def warmup_steps(config: Config) -> int:
    """Returns the length of the warm-up, which leaves the cosine at least one step."""
    return min(config.warmup, max((config.decay_steps or config.steps) - 1, 0))


def learning_rate(config: Config) -> optax.Schedule:
    """Returns the learning rate as a function of `state.step`; 0 is the first step."""
    decay_steps, warmup = config.decay_steps or config.steps, warmup_steps(config)
    lowest = min(config.lr_min, config.lr)  # a small lr= on the command line must not climb to the preset's lr_min
    cosine = optax.cosine_decay_schedule(
        config.lr, max(decay_steps - warmup, 1), alpha=lowest / config.lr if config.lr else 0.0
    )
    schedule = cosine
    if warmup:
        # The first step's rate is lr / warmup rather than zero, so that it trains too.
        rising = optax.linear_schedule(config.lr / warmup, config.lr, max(warmup - 1, 1))
        schedule = optax.join_schedules([rising, cosine], [warmup])

    def rate(step):
        with jax.numpy_dtype_promotion("standard"):  # optax divides integer steps; our own code is strict
            return jnp.float32(schedule(step))

    return rate
