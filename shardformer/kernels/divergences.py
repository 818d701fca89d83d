"""KL divergences of two distributions over a vocabulary that is split over a mesh axis."""

import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives


def measure_divergence(student_BTv: Array, teacher_BTv: Array, axis: str, direction: str) -> Array:
    """Returns the KL divergence of every token from the two models' logits; padded entries, -inf, have none.

    forward: the sum of p_teacher log(p_teacher / p_student); reverse: of p_student log(p_student / p_teacher).
    """
    real_BTv = jnp.isfinite(teacher_BTv) & jnp.isfinite(student_BTv)
    student_BTv, teacher_BTv = (_log_probabilities(x, axis) for x in (student_BTv, teacher_BTv))
    first, second = (teacher_BTv, student_BTv) if direction == "forward" else (student_BTv, teacher_BTv)
    # -inf - -inf would be NaN, in the gradient too.
    first, second = (jnp.where(real_BTv, x, 0.0) for x in (first, second))
    terms_BTv = jnp.where(real_BTv, jnp.exp(first), 0.0) * (first - second)
    return collectives.psum(terms_BTv.sum(-1), axis)


def _log_probabilities(logits_BTv: Array, axis: str) -> Array:
    """Returns the logarithms of the probabilities of this shard's entries."""
    max_BT = collectives.pmax(lax.stop_gradient(logits_BTv).max(-1), axis)
    log_z_BT = max_BT + jnp.log(collectives.psum(jnp.exp(logits_BTv - max_BT[..., None]).sum(-1), axis))
    return logits_BTv - log_z_BT[..., None]
