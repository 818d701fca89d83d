"""Attention whose keys and values are computed from a latent of each token, as DeepSeek's (MLA).

A token's latent serves all heads, and so does its rotary key; a cache has only these two. Rows of a prompt are attended
to with keys and values of each head. A new token multiplies its queries with `k` instead of every cached latent, and
the sums of latents with `v`, so that decoding expands no cache:

    logits = q . (latent @ k) = (q @ k^T) . latent        values = weights . (latent @ v) = (weights . latent) @ v

Every shard of the model computes the latents; `q`, `k`, `v` and `o` are split by heads.
"""

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.kernels.attention import AttentionOptions, Cache
from shardformer.kernels.linear import split_heads
from shardformer.kernels.rotary import rotate
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import weight

EPS = 1e-6  # of the latents' norms, whatever norm_eps is: DeepSeek's


class LatentLayerShard(TransformerLayerShard):
    """A transformer layer with latent attention. E numbers of a token are cached: its latent C and its rotary key R.

    A head's key has R rotary numbers, which all heads share, before its own N; values have V numbers.
    """

    def attention(self, h_BTD: Array, options: AttentionOptions, cache: Cache | None) -> tuple[Array, Cache]:
        model, h = self.config.model, collectives.local(self.config.model.heads)
        C, R, K = model.kv_latent, model.rotary_size, model.head_size
        assert C is not None  # the rules of keys require it and positions=rotary
        assert options.frequency is not None
        angles = options.position_T, options.frequency, options.rotary_factor
        x_BTI = h_BTD
        if model.q_latent:
            x_BTI = self._norm("q_latent_norm", self._compress("q_latent", h_BTD, model.q_latent))
        q_BThK = self.scale_queries(rotate(self._expand("q", x_BTI, h * K), *angles), options)
        both_BTE = self._compress("kv_latent", h_BTD, C + R)
        latent_BTC = self._norm("kv_latent_norm", both_BTE[..., :C])
        rotary_BT1R = rotate(both_BTE[..., None, C:], *angles)
        cached_BT1E = jnp.concatenate([latent_BTC[:, :, None], rotary_BT1R], axis=-1)
        if cache is None:
            k_BThK = _join_keys(rotary_BT1R, self._expand("k", latent_BTC, h * (K - R)))
            a_BThV = self.attend(q_BThK, k_BThK, self._expand("v", latent_BTC, h * model.value_size), options)
            return self.join_heads(a_BThV), Cache(jnp.swapaxes(cached_BT1E, 1, 2))
        k_ChN, v_ChV = self._by_head("k", [C, h, K - R], q_BThK), self._by_head("v", [C, h, model.value_size], q_BThK)
        q_BThC = jnp.einsum("bthn,chn->bthc", q_BThK[..., R:], k_ChN)
        q_BThE = jnp.concatenate([q_BThC, q_BThK[..., :R]], axis=-1)
        a_BThE, cache = self.method.attend_to_cache(q_BThE, cached_BT1E, None, cache, options._replace(head_size=K))
        return self.join_heads(jnp.einsum("bthc,chv->bthv", a_BThE[..., :C], v_ChV)), cache

    def _compress(self, name: str, h_BTD: Array, out: int) -> Array:
        """Returns the product with a matrix that every shard of the model has; its gradient is summed over mp."""
        w_DO = weight(name, [h_BTD.shape[-1], out], self.config.model.init_std or h_BTD.shape[-1] ** -0.5)
        return self.multiply(name, h_BTD, jax.tree.map(collectives.vary_over_mp, w_DO))

    @hk.name_like("__call__")  # else Haiku adds this method's name to the norm's path
    def _norm(self, name: str, x_BTC: Array) -> Array:
        return Norm(self.config, name, EPS)(x_BTC)

    def _expand(self, name: str, x_BTI: Array, out: int) -> Array:
        """Returns the product with a matrix of all heads, [B, T, h, out / h]."""
        stddev = self.config.model.init_std or x_BTI.shape[-1] ** -0.5
        return split_heads(self.linear(name, x_BTI, stddev, out), collectives.local(self.config.model.heads))

    def _by_head(self, name: str, shape: list[int], like: Array) -> Array:
        """Returns this shard's part of `k` or `v`, [C, h, size], which a new token multiplies with its own arrays."""
        w = weight(name, [shape[0], shape[1] * shape[2]], stddev=1.0)  # never drawn here
        return w.astype(like.dtype).reshape(shape)


def _join_keys(rotary_BT1R: Array, k_BThN: Array) -> Array:
    """Returns each head's key; the gradient of the part that all heads share is summed in float32."""
    shared = jnp.broadcast_to(rotary_BT1R.astype(jnp.float32), (*k_BThN.shape[:3], rotary_BT1R.shape[-1]))
    return jnp.concatenate([shared.astype(k_BThN.dtype), k_BThN], axis=-1)
