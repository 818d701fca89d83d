"""Losses of pairs from the log-probabilities of their two sides, and the rewards that they imply.

Arrays with two sides are [b, 2, K]: chosen, then rejected, of up to K pairs in a row. Results are [b, K].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array


class Losses(NamedTuple):
    """The loss and the two rewards of every pair."""

    loss: Array
    chosen: Array
    rejected: Array


class Sides(NamedTuple):
    """Sums over the scored tokens of each side: log-probabilities, those of the reference, and tokens."""

    logp: Array
    reference: Array
    tokens: Array


def compute_losses(sides: Sides, keys, kl: Array | float = 0.0) -> Losses:
    """Returns the loss of every pair under an objective of `PreferenceKeys`; `kl` is the divergence that KTO needs."""
    score = sides.logp - sides.reference
    normed = score / jnp.maximum(sides.tokens, 1)  # a slot without a pair has no tokens
    used = normed if keys.is_normed else score
    margin = used[:, 0] - used[:, 1]
    if keys.objective == "ipo":
        loss = jnp.square(margin - 1 / (2 * keys.beta))
    elif keys.objective == "kto":
        loss = 1 - (jax.nn.sigmoid(keys.beta * (score[:, 0] - kl)) + jax.nn.sigmoid(keys.beta * (kl - score[:, 1]))) / 2
    elif keys.objective == "orpo":
        loss = -keys.beta * jax.nn.log_sigmoid(margin - (log_complement(normed[:, 0]) - log_complement(normed[:, 1])))
    else:
        gap = keys.reward_gap if keys.objective == "simpo" else 0.0
        loss = smooth_sigmoid_loss(keys.beta * margin - gap, keys.label_smoothing)
    rewards = keys.beta * jax.lax.stop_gradient(normed if keys.objective in ("orpo", "simpo") else score)
    return Losses(loss, rewards[:, 0], rewards[:, 1])


def smooth_sigmoid_loss(margin: Array, smoothing: float) -> Array:
    """Returns -log sigmoid of a margin, or its mean if the fraction `smoothing` of the labels is wrong."""
    right, wrong = jax.nn.log_sigmoid(margin), jax.nn.log_sigmoid(-margin)
    return -(1 - smoothing) * right - smoothing * wrong


def log_complement(logp: Array) -> Array:
    """Returns log(1 - exp(logp)) of a log-probability below 0, without cancellation at either end.

    An empty slot's log-probability is 0, whose complement would be -inf: it gets that of a half instead.
    """
    logp = jnp.where(logp < 0, logp, -jnp.log(2.0))
    near_zero = logp > -jnp.log(2.0)
    first = jnp.log(-jnp.expm1(jnp.where(near_zero, logp, -1.0)))
    return jnp.where(near_zero, first, jnp.log1p(-jnp.exp(jnp.where(near_zero, -1.0, logp))))
