"""Rotary positions: each (even, odd) pair of a head's first dimensions rotates by its frequency times the position."""

from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

if TYPE_CHECKING:
    from shardformer.config.rotary_scaling import RotaryScaling


def find_frequencies(
    size: int, theta: float, scaling: "RotaryScaling | None" = None, long_rows: bool = False
) -> np.ndarray:
    """Returns radians per position of each of size / 2 pairs, in float32 as Llama's authors compute them.

    long_rows: those of rows of more than scaling.old_seq tokens, for longrope.
    """
    frequency = np.float32(1) / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    if scaling is None:
        return frequency
    from shardformer.kernels.scaled_frequencies import scale_frequencies  # not imported without a scaling

    return scale_frequencies(frequency, theta, scaling, long_rows)


def rotate(x_BThK: Array, position_T: Array, frequency: np.ndarray | Array, factor: Array | float = 1.0) -> Array:
    """Returns x with its first 2 * len(frequency) dimensions rotated, times `factor`; the rest pass unchanged."""
    angle = position_T.astype(jnp.float32)[:, None] * frequency[None, :]  # [T, pairs]
    sin, cos = ((f(angle) * factor).astype(x_BThK.dtype)[None, :, None, :] for f in (jnp.sin, jnp.cos))
    return _rotate(x_BThK, sin, cos)


@jax.custom_vjp
def _rotate(x_BThK, sin, cos):
    return lax.platform_dependent(x_BThK, sin, cos, tpu=rotate_by_product, default=rotate_by_slices)


def _forward(x_BThK, sin, cos):
    return _rotate(x_BThK, sin, cos), (sin, cos)


def _backward(saved, gradient):
    """Rotates the gradient back."""
    sin, cos = saved
    return _rotate(gradient, -sin, cos), jnp.zeros_like(sin), jnp.zeros_like(cos)


_rotate.defvjp(_forward, _backward)


def rotate_by_slices(x_BThK: Array, sin: Array, cos: Array) -> Array:
    """Rotates even and odd dimensions by the textbook formula."""
    rotary_dims = 2 * sin.shape[-1]
    turned, rest = x_BThK[..., :rotary_dims], x_BThK[..., rotary_dims:]
    even, odd = turned[..., 0::2], turned[..., 1::2]
    turned = jnp.stack([even * cos - odd * sin, odd * cos + even * sin], axis=-1).reshape(turned.shape)
    return jnp.concatenate([turned, rest], axis=-1)


def rotate_by_product(x_BThK: Array, sin: Array, cos: Array) -> Array:
    """Rotates complete heads as x cos + (x partner) sin; the matrix swaps the values of each pair.

    A TPU's compiler estimates four times as many cycles for slices of every second number.
    """
    K, rotary_dims = x_BThK.shape[-1], 2 * sin.shape[-1]
    rest = [(0, 0)] * 3 + [(0, K - rotary_dims)]
    sin, cos = (jnp.pad(jnp.repeat(f, 2, axis=-1), rest, constant_values=c) for f, c in ((sin, 0), (cos, 1)))
    partner_KK = np.zeros((K, K), np.float32)
    even = np.arange(0, rotary_dims, 2)
    partner_KK[even + 1, even], partner_KK[even, even + 1] = -1, 1
    partners = jnp.matmul(x_BThK, partner_KK.astype(x_BThK.dtype), precision="highest")
    return x_BThK * cos + partners * sin
