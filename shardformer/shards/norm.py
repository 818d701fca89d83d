"""LayerNorm and RMSNorm over the full width: one copy, applied to replicated activations, so its gradient is exact.

Norms of queries and keys (`norm_heads`) see only this shard's heads.
"""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import MP
from shardformer.shards.parameters import add_bias, ones, zeros


@dataclasses.dataclass
class Norm(hk.Module):
    """One norm with its scale and, unless bias=none, its offset; norm=plain_layernorm has neither."""

    config: Config
    name: str = "norm"

    def __call__(self, x_BTD: Array) -> Array:
        """Computes in float32; returns the input's dtype."""
        x = x_BTD.astype(jnp.float32)
        if self.config.model.norm in ("layernorm", "plain_layernorm"):
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.config.model.norm_eps)
        if self.config.model.norm != "plain_layernorm":
            x = x * _factor("scale", x.shape[-1], self.config).reshape(1, 1, -1)
        if "norm" in self.config.model.biased:
            x = add_bias(x, zeros("offset", x.shape[-1]))
        return x.astype(x_BTD.dtype)


def norm_heads(name: str, x_BThK: Array, config: Config) -> Array:
    """Applies RMSNorm to this shard's queries or keys: to each head or, with qk_norm=all, to all shards' heads as one.

    Computes in float32; returns the input's dtype.
    """
    x, K = x_BThK.astype(jnp.float32), x_BThK.shape[-1]
    if config.model.qk_norm == "head":
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
