"""The learning rate: a linear warm-up, then the shape that schedule= names; each is a function at the end."""

import jax
import jax.numpy as jnp
import optax

from shardformer.config import Config
from shardformer.config.registries import Registry, call_with

SCHEDULES = Registry("optim/schedule.py")


def decay_end(config: Config) -> int:
    """Returns the step from which the rate is lr_min."""
    return config.optimizer.decay_steps or config.training.steps


def warmup_steps(config: Config) -> int:
    """Returns the length of the warm-up, which leaves a decay at least one step."""
    if not config.optimizer.falls:
        return config.optimizer.warmup
    return min(config.optimizer.warmup, max(decay_end(config) - 1, 0))


def wsd_decay_steps(config: Config) -> int:
    """Returns the length of the decay of schedule=wsd, which starts after the warm-up."""
    after_warmup = max(decay_end(config) - warmup_steps(config), 1)
    return min(config.optimizer.decay or max(decay_end(config) // 10, 1), after_warmup)


def learning_rate(config: Config) -> optax.Schedule:
    """Returns the learning rate as a function of `state.step`; 0 is the first step."""
    warmup = warmup_steps(config)
    schedule = call_with(SCHEDULES[config.optimizer.schedule], _describe_decay(config, warmup))
    if warmup:
        # The first step's rate is lr / warmup rather than zero, so that it trains too.
        rising = optax.linear_schedule(config.optimizer.lr / warmup, config.optimizer.lr, max(warmup - 1, 1))
        schedule = optax.join_schedules([rising, schedule], [warmup])

    def rate(step):
        with jax.numpy_dtype_promotion("standard"):  # optax divides integer steps; our code is strict
            return jnp.float32(schedule(step))

    return rate


def _describe_decay(config: Config, warmup: int) -> dict:
    """Returns what a schedule may ask for."""
    keys = config.optimizer
    return {
        "peak": keys.lr,
        "lowest": min(keys.lr_min, keys.lr),  # a small lr= on the command line must not climb to the preset's lr_min
        "steps": max(decay_end(config) - warmup, 1),
        "decay": wsd_decay_steps(config),
    }


# A schedule is a function of the steps after the warm-up, and reaches `lowest` after `steps` of them.


@SCHEDULES.register
def cosine(peak: float, lowest: float, steps: int) -> optax.Schedule:
    return optax.cosine_decay_schedule(peak, steps, alpha=lowest / peak if peak else 0.0)


@SCHEDULES.register
def wsd(peak: float, lowest: float, steps: int, decay: int) -> optax.Schedule:
    return optax.linear_schedule(peak, lowest, decay, transition_begin=steps - decay)


@SCHEDULES.register
def linear(peak: float, lowest: float, steps: int) -> optax.Schedule:
    return optax.linear_schedule(peak, lowest, steps)


@SCHEDULES.register
def constant(peak: float) -> optax.Schedule:
    return optax.constant_schedule(peak)
