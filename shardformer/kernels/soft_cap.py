"""The soft cap of logits, as Gemma 2 has it."""

import jax.numpy as jnp
from jax import Array


def soft_cap(logits: Array, cap: float | None) -> Array:
    """Returns logits bounded by cap * tanh(logits / cap); without a cap, the logits."""
    return logits if cap is None else cap * jnp.tanh(logits / cap)
