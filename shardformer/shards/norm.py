"""LayerNorm and RMSNorm over the full width: one copy, applied to replicated activations, so its gradient is exact."""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.shards.parameters import add_bias, ones, zeros


@dataclasses.dataclass
class Norm(hk.Module):
    """One norm with its scale and, unless bias=none, its offset."""

    config: Config
    name: str = "norm"

    def __call__(self, x_BTD: Array) -> Array:
        """Computes in float32; returns the input's dtype."""
        x = x_BTD.astype(jnp.float32)
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.config.norm_eps)
        x = x * ones("scale", x.shape[-1]).reshape(1, 1, -1)
        if self.config.bias != "none":
            x = add_bias(x, zeros("offset", x.shape[-1]))
        return x.astype(x_BTD.dtype)
