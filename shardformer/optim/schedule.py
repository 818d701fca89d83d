"""The learning rate: a linear warm-up, then the shape that schedule= names."""

import jax
import jax.numpy as jnp
import optax

from shardformer.config import Config


def decay_end(config: Config) -> int:
    """Returns the step from which the rate is lr_min."""
    return config.optimizer.decay_steps or config.training.steps


def warmup_steps(config: Config) -> int:
    """Returns the length of the warm-up, which leaves a decay at least one step."""
    if config.optimizer.schedule == "constant":
        return config.optimizer.warmup
    return min(config.optimizer.warmup, max(decay_end(config) - 1, 0))


def wsd_decay_steps(config: Config) -> int:
    """Returns the length of the decay of schedule=wsd, which starts after the warm-up."""
    after_warmup = max(decay_end(config) - warmup_steps(config), 1)
    return min(config.optimizer.decay or max(decay_end(config) // 10, 1), after_warmup)


def learning_rate(config: Config) -> optax.Schedule:
    """Returns the learning rate as a function of `state.step`; 0 is the first step."""
    warmup = warmup_steps(config)
    schedule = _after_warmup(config, max(decay_end(config) - warmup, 1))
    if warmup:
        # The first step's rate is lr / warmup rather than zero, so that it trains too.
        rising = optax.linear_schedule(config.optimizer.lr / warmup, config.optimizer.lr, max(warmup - 1, 1))
        schedule = optax.join_schedules([rising, schedule], [warmup])

    def rate(step):
        with jax.numpy_dtype_promotion("standard"):  # optax divides integer steps; our code is strict
            return jnp.float32(schedule(step))

    return rate


def _after_warmup(config: Config, steps: int) -> optax.Schedule:
    """Returns the rate as a function of the steps after the warm-up; it reaches lr_min after `steps` of them."""
    lowest = min(
        config.optimizer.lr_min, config.optimizer.lr
    )  # a small lr= on the command line must not climb to the preset's lr_min
    if config.optimizer.schedule == "constant":
        return optax.constant_schedule(config.optimizer.lr)
    if config.optimizer.schedule == "linear":
        return optax.linear_schedule(config.optimizer.lr, lowest, steps)
    if config.optimizer.schedule == "wsd":
        decay = wsd_decay_steps(config)
        return optax.linear_schedule(config.optimizer.lr, lowest, decay, transition_begin=steps - decay)
    return optax.cosine_decay_schedule(
        config.optimizer.lr, steps, alpha=lowest / config.optimizer.lr if config.optimizer.lr else 0.0
    )
