"""Rotary positions: each (even, odd) pair of a head's first dimensions rotates by its frequency times the position."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.config.parsing import RotaryScaling


def find_frequencies(
    size: int, theta: float, scaling: RotaryScaling | None = None, long_rows: bool = False
) -> np.ndarray:
    """Returns radians per position of each of size / 2 pairs, in float32 as Llama's authors compute them.

    long_rows: those of rows of more than scaling.old_seq tokens, for longrope.
    """
    frequency = np.float32(1) / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    if scaling is None:
        return frequency
    if scaling.kind == "longrope":
        return frequency / np.array(scaling.long if long_rows else scaling.short, np.float32)
    stretched = frequency / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched
    share = _share_by_yarn(size, theta, scaling) if scaling.kind == "yarn" else _share_by_llama3(frequency, scaling)
    return (1 - share) * stretched + share * frequency


def _share_by_llama3(frequency: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Returns llama3's share: linear in the rotations of each pair within the first training's context."""
    turns_before = np.float32(scaling.old_seq) * frequency / np.float32(2 * math.pi)
    span = scaling.high - scaling.low or 1e-9  # Llama 4's is empty: a pair keeps its frequency or is stretched
    return np.clip((turns_before - scaling.low) / np.float32(span), 0, 1).astype(np.float32)


def _share_by_yarn(size: int, theta: float, scaling: RotaryScaling) -> np.ndarray:
    """Returns YaRN's share: linear in the number of the pair, as transformers computes it."""

    def pair_with(turns: float) -> float:
        return size * math.log(scaling.old_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.high), pair_with(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    stretched = (np.arange(size // 2, dtype=np.float32) - first) / np.float32(last - first or 0.001)
    return 1 - np.clip(stretched, 0, 1)


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
