"""LayerNorm and RMSNorm over the full width: one copy, applied to replicated activations, so its gradient is exact.

A registered function is a value of `norm=`; it computes in float32. Norms of queries and keys (`norm_heads`) see only
this shard's heads.
"""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import MP
from shardformer.config.registries import Registry
from shardformer.shards.parameters import add_bias, ones, zeros

NORMS = Registry("shards/norm.py")


@dataclasses.dataclass
class Norm(hk.Module):
    """One norm of NORMS and, unless bias=none, its offset."""

    config: Config
    name: str = "norm"
    eps: float | None = None  # None: norm_eps

    def __call__(self, x_BTD: Array) -> Array:
        """Computes in float32; returns the input's dtype."""
        x = NORMS[self.config.model.norm](x_BTD.astype(jnp.float32), self.eps or self.config.model.norm_eps)
        if "norm" in self.config.model.biased:
            x = add_bias(x, zeros("offset", x.shape[-1]))
        return x.astype(x_BTD.dtype)


@NORMS.register
def layernorm(x_BTD: Array, eps: float) -> Array:
    return _multiply(plain_layernorm(x_BTD, eps), ones("scale", x_BTD.shape[-1]))


@NORMS.register
def layernorm_plus_one(x_BTD: Array, eps: float) -> Array:
    return _multiply(plain_layernorm(x_BTD, eps), 1 + zeros("scale", x_BTD.shape[-1]))


@NORMS.register
def rmsnorm(x_BTD: Array, eps: float) -> Array:
    return _multiply(_divide_by_rms(x_BTD, eps), ones("scale", x_BTD.shape[-1]))


@NORMS.register
def rmsnorm_plus_one(x_BTD: Array, eps: float) -> Array:
    return _multiply(_divide_by_rms(x_BTD, eps), 1 + zeros("scale", x_BTD.shape[-1]))


@NORMS.register
def plain_layernorm(x_BTD: Array, eps: float) -> Array:
    return _divide_by_rms(x_BTD - x_BTD.mean(-1, keepdims=True), eps)


def _divide_by_rms(x, eps):
    return x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + eps)


def _multiply(x_BTD, scale_D):
    return x_BTD * scale_D.reshape(1, 1, -1)


def norm_heads(name: str, x_BThK: Array, config: Config) -> Array:
    """Applies RMSNorm to this shard's queries or keys: to each head or, with qk_norm=all, to all shards' heads as one.

    Computes in float32; returns the input's dtype.
    """
    x, K = x_BThK.astype(jnp.float32), x_BThK.shape[-1]
    if config.model.qk_norm == "rotated_plain":
        return _divide_by_rms(x, config.model.norm_eps).astype(x_BThK.dtype)
    if config.model.qk_norm != "all":
        mean_BTh1 = jnp.square(x).mean(-1, keepdims=True)
        factor = collectives.vary_over_mp(_factor(f"{name}_head_scale", K, config))
    else:
        size = x.shape[2] * K
        mean_BTh1 = collectives.reduce(jnp.square(x).sum((2, 3), keepdims=True)) / (size * lax.axis_size(MP))
        factor = _factor(f"{name}_scale", size, config)
    return (x * lax.rsqrt(mean_BTh1 + config.model.norm_eps) * factor.reshape(1, 1, -1, K)).astype(x_BThK.dtype)


def _factor(name: str, size: int, config: Config) -> Array:
    """Returns a norm's factor: the parameter or, with norm=rmsnorm_plus_one, the sum of 1 and the parameter."""
    return 1 + zeros(name, size) if config.model.norm == "rmsnorm_plus_one" else ones(name, size)
