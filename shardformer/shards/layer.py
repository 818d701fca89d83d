"""One transformer layer: this shard's heads and its slice of the feed-forward, one or two all-reduces."""

import dataclasses
import math
from typing import NamedTuple

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config import Config
from shardformer.shards import axes
from shardformer.shards.dropout import Dropout
from shardformer.shards.gelu import gelu
from shardformer.shards.linear import linear
from shardformer.shards.norm import Norm
from shardformer.shards.parameters import add_bias, weight, zeros
from shardformer.shards.positions import rotate


class Cache(NamedTuple):
    """What one layer remembers of the tokens it has seen."""

    k_BShK: jax.Array
    v_BShK: jax.Array


class Attending(NamedTuple):
    """Who attends to whom: the same for every layer."""

    query_T: jax.Array  # positions of the tokens that come in
    key_S: jax.Array  # positions of those that they may look at: themselves, or the cache
    bias_1hTS: jax.Array | None = None  # T5's relative bias


@dataclasses.dataclass
class TransformerLayerShard(hk.Module):
    config: Config
    name: str = "layers"

    def __call__(self, x_BTD, attending: Attending, dropout: Dropout | None = None, cache: Cache | None = None):
        """x_BTD after the layer, and the keys and values it attended to (the cache with this token in it)."""
        if self.config.block == "parallel":
            h_BTD = axes.fan_out(Norm(self.config, "norm")(x_BTD))
            attended, cache = self.attention(h_BTD, attending, dropout, cache)
            partial = attended + self.feed_forward(h_BTD)
            return x_BTD + self.branch(partial, ["o_bias", "down_bias"], dropout, site=1), cache

        h_BTD = axes.fan_out(Norm(self.config, "attention_norm")(x_BTD))
        partial, cache = self.attention(h_BTD, attending, dropout, cache)
        x_BTD = x_BTD + self.branch(partial, ["o_bias"], dropout, site=1)
        h_BTD = axes.fan_out(Norm(self.config, "feed_forward_norm")(x_BTD))
        return x_BTD + self.branch(self.feed_forward(h_BTD), ["down_bias"], dropout, site=2), cache

    @hk.name_like("__call__")
    def attention(self, h_BTD, attending, dropout, cache):
        """This shard's heads' contribution to the output projection: a partial sum over mp."""
        q_BThK, k_BThK, v_BThK = (self._heads(name, h_BTD) for name in "qkv")
        if self.config.positions == "rotary":
            q_BThK, k_BThK = (rotate(x, attending.query_T, self.config.rotary_size) for x in (q_BThK, k_BThK))
        cache = _remember(cache, k_BThK, v_BThK, attending.query_T)
        a_BThK = _attend(q_BThK, cache, attending, dropout)
        B, T, h, K = a_BThK.shape
        return self._linear("o", a_BThK.reshape(B, T, h * K), self._residual_stddev(self.config.d_model)), cache

    @hk.name_like("__call__")
    def feed_forward(self, h_BTD):
        """This shard's slice of the hidden layer's contribution: a partial sum over mp."""
        u_BTf = self._linear("up", h_BTD, out=axes.local(self.config.ff_size))
        if self.config.bias != "none":
            u_BTf = add_bias(u_BTf, zeros("up_bias", u_BTf.shape[-1]))
        return self._linear("down", gelu(u_BTf), self._residual_stddev(self.config.ff_size))

    @hk.name_like("__call__")
    def branch(self, partial_BTD, bias_names, dropout, site):
        """The residual branch, whole: biases come after the sum over shards, or they would count mp times."""
        y_BTD = axes.reduce(partial_BTD)
        for name in bias_names:
            if self.config.bias == "all" or (self.config.bias == "ff" and name == "down_bias"):
                y_BTD = add_bias(y_BTD, zeros(name, self.config.d_model))
        return dropout.at(site)(y_BTD) if dropout else y_BTD

    @hk.name_like("__call__")
    def _heads(self, name, h_BTD):
        h, K = axes.local(self.config.heads), self.config.head_size
        y_BTd = self._linear(name, h_BTD, out=h * K)
        if self.config.bias == "all":
            y_BTd = add_bias(y_BTd, zeros(f"{name}_bias", h * K))
        return y_BTd.reshape(*y_BTd.shape[:-1], h, K)

    @hk.name_like("__call__")
    def _linear(self, name, x, stddev=None, out=None):
        """x[..., I] @ w[I, O] in the compute dtype; O is d_model unless `out` says otherwise."""
        d_model = self.config.d_model
        stddev = stddev or self.config.init_std or 1 / math.sqrt(d_model)
        w = weight(name, [x.shape[-1], out or d_model], stddev)
        return linear(x, w.astype(x.dtype))

    def _residual_stddev(self, fan_in: int) -> float:
        """Smaller with depth (GPT-2), so that the residual stream's variance does not grow with the layers."""
        return (self.config.init_std or 1 / math.sqrt(fan_in)) / math.sqrt(2 * self.config.layers)


def _remember(cache: Cache | None, k_BThK, v_BThK, position_T) -> Cache:
    if cache is None:
        return Cache(k_BThK, v_BThK)
    put = lambda old, new: lax.dynamic_update_slice_in_dim(old, new, position_T[0], axis=1)
    return Cache(put(cache.k_BShK, k_BThK), put(cache.v_BShK, v_BThK))


def _attend(q_BThK, cache: Cache, attending: Attending, dropout: Dropout | None):
    """Causal attention of this shard's heads; logits and softmax in float32."""
    scale = np.float32(1 / math.sqrt(q_BThK.shape[-1]))
    logits_BhTS = jnp.einsum("bthk,bshk->bhts", q_BThK, cache.k_BShK, preferred_element_type=jnp.float32) * scale
    if attending.bias_1hTS is not None:
        logits_BhTS = logits_BhTS + attending.bias_1hTS
    causal_TS = attending.key_S[None, :] <= attending.query_T[:, None]
    weights_BhTS = jax.nn.softmax(jnp.where(causal_TS[None, None], logits_BhTS, -1e30), axis=-1)
    if dropout:
        weights_BhTS = dropout.at(0).heads(weights_BhTS)
    return jnp.einsum("bhts,bshk->bthk", weights_BhTS.astype(q_BThK.dtype), cache.v_BShK)
