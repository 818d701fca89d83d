"""LayerNorm and RMSNorm over the whole width: one copy, applied to replicated activations, so its gradient is whole."""

import dataclasses

import haiku as hk
import jax.numpy as jnp
from jax import lax

from shardformer.config import Config
from shardformer.shards.parameters import add_bias, ones, zeros


@dataclasses.dataclass
class Norm(hk.Module):
    config: Config
    name: str = "norm"

    def __call__(self, x_BTD):
        """In float32, whatever comes in; out in the input's dtype."""
        x = x_BTD.astype(jnp.float32)
        if self.config.norm == "layernorm":
            x = x - x.mean(-1, keepdims=True)
        x = x * lax.rsqrt(jnp.square(x).mean(-1, keepdims=True) + self.config.norm_eps)
        x = x * ones("scale", x.shape[-1]).reshape(1, 1, -1)
        if self.config.bias != "none":
            x = add_bias(x, zeros("offset", x.shape[-1]))
        return x.astype(x_BTD.dtype)
