"""`moment_dtype=bfloat16`: the optimizer's moments in half the memory between steps.

The update runs in float32. The moments are then rounded stochastically, which keeps their mean exact. With rounding to
the nearest, a second moment with beta2 above 0.998 would no longer change.
"""

import jax
import jax.numpy as jnp
import optax
from jax import lax

from shardformer.config.names import Stream
from shardformer.kernels.threefry import THREEFRY


def store_in_bfloat16(optimizer: optax.GradientTransformationExtraArgs, seed: int):
    """Wraps the optimizer so that its state has moments in bfloat16."""

    def init(params):
        return _map_moments(optimizer, lambda leaf: leaf.astype(jnp.bfloat16), optimizer.init(params))  # zeros

    def update(updates, state, params=None, *, step, **extra):
        moments = _map_moments(optimizer, lambda leaf: leaf.astype(jnp.float32), state)
        updates, moments = optimizer.update(updates, moments, params, step=step, **extra)
        return updates, round_moments(optimizer, moments, step, seed)

    return optax.GradientTransformationExtraArgs(init, update)


def round_moments(optimizer: optax.GradientTransformation, state, step, seed: int):
    """Rounds the moments to bfloat16, by random bits that are a function of the seed, the step and the leaf."""
    key = jax.random.fold_in(jax.random.fold_in(jax.random.key(seed, impl=THREEFRY), Stream.ROUNDING), step)
    count = iter(range(1 << 20))
    return _map_moments(optimizer, lambda leaf: round_at_random(leaf, jax.random.fold_in(key, next(count))), state)


def round_at_random(x, key):
    """Rounds float32 to bfloat16: adds random bits to the lower half, then keeps the upper half.

    Does not change non-finite values, nor values that bfloat16 has exactly. A finite value stays finite: beyond
    bfloat16's maximum it becomes that maximum.
    """
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    rounded = _keep_upper_half(bits + noise)
    finite = jnp.where(jnp.isfinite(rounded), rounded, _keep_upper_half(bits))
    return jnp.where(jnp.isfinite(x), finite, x).astype(jnp.bfloat16)


def _keep_upper_half(bits):
    """Returns the float32 whose bits are the upper half of these: a number that bfloat16 holds."""
    return lax.bitcast_convert_type(bits & jnp.uint32(0xFFFF0000), jnp.float32)


def _map_moments(optimizer, function, state):
    """Applies `function` to each parameter's moments."""
    return optax.tree_map_params(optimizer, function, state)
