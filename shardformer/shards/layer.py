"""One transformer layer: this shard's heads and its slice of the feed-forward, one or two all-reduces."""

import dataclasses
import functools
import math
from collections.abc import Callable

import haiku as hk
import jax
import jax.numpy as jnp
from jax import Array

from shardformer.config import Config
from shardformer.config.names import MATRICES
from shardformer.kernels.gelu import gelu
from shardformer.kernels.linear import linear
from shardformer.kernels.rotary import rotate
from shardformer.kernels.split_heads import split_heads
from shardformer.shards import axes
from shardformer.shards.attention import AttentionContext, Cache, attend, attend_to_cache
from shardformer.shards.dropout import Dropout
from shardformer.shards.norm import Norm, norm_heads
from shardformer.shards.parameters import LORA_IN, LORA_OUT, add_bias, weight, zeros
from shardformer.shards.remat import name_product, name_sum, recompute_attention

ACTIVATIONS: dict[str, Callable] = {
    "gelu": gelu,
    "gelu_exact": functools.partial(jax.nn.gelu, approximate=False),
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "swiglu": jax.nn.silu,  # of the gate
    "geglu": gelu,
}

ADAPTER_SITE = 3  # the number of the first matrix among a layer's sites of dropout
ROW_PARALLEL = ("o", "down")  # split by inputs: their products are partial sums


@dataclasses.dataclass
class TransformerLayerShard(hk.Module):
    """Norms, attention, feed-forward and their biases, in the order that block= gives."""

    config: Config
    name: str = "layers"

    def __call__(
        self, x_BTD: Array, context: AttentionContext, dropout: Dropout | None = None, cache: Cache | None = None
    ) -> tuple[Array, Cache]:
        """Returns x_BTD after the layer, and the keys and values it attended to (the cache with this token in it)."""
        if self.config.block in ("parallel", "parallel_two_norms"):
            two_norms = self.config.block == "parallel_two_norms"
            h_BTD = self._enter("attention_norm" if two_norms else "norm", x_BTD)
            attended, cache = self.attention(h_BTD, context, dropout, cache)
            if two_norms:
                h_BTD = self._enter("feed_forward_norm", x_BTD)
            partial = attended + self.feed_forward(h_BTD, dropout)
            return x_BTD + self.branch(partial, ["o", "down"], dropout, site=1), cache

        partial, cache = self.attention(self._enter("attention_norm", x_BTD), context, dropout, cache)
        x_BTD = x_BTD + self.branch(partial, ["o"], dropout, site=1, post_norm="post_attention_norm")
        partial = self.feed_forward(self._enter("feed_forward_norm", x_BTD), dropout)
        return x_BTD + self.branch(partial, ["down"], dropout, site=2, post_norm="post_feed_forward_norm"), cache

    def attention(
        self, h_BTD: Array, context: AttentionContext, dropout: Dropout | None, cache: Cache | None
    ) -> tuple[Array, Cache]:
        """Returns this shard's heads' part of the output projection, a partial sum over mp, and the cache."""
        q_BThK, k_BThK, v_BThK = (self._heads(name, h_BTD, dropout) for name in "qkv")
        if context.frequency is not None:
            angles = context.query_T, context.frequency, self.config.rotary_factor
            q_BThK, k_BThK = (rotate(x, *angles) for x in (q_BThK, k_BThK))
        if self.config.attention_scale:  # attention itself divides by sqrt(K)
            q_BThK = q_BThK * (self.config.attention_scale * math.sqrt(self.config.head_size))
        if cache is None:
            a_BThK = self._attend(q_BThK, k_BThK, v_BThK, context, dropout)
            cache = Cache(jnp.swapaxes(k_BThK, 1, 2), jnp.swapaxes(v_BThK, 1, 2))
        else:
            a_BThK, cache = attend_to_cache(q_BThK, k_BThK, v_BThK, cache, context)
        B, T, h, K = a_BThK.shape
        stddev = self._residual_stddev(self.config.attention_size)
        return self._linear("o", a_BThK.reshape(B, T, h * K), dropout, stddev), cache

    def feed_forward(self, h_BTD: Array, dropout: Dropout | None) -> Array:
        """Returns this shard's slice of the hidden layer's contribution: a partial sum over mp."""
        f = axes.local(self.config.ff_size)
        u_BTf = self._linear("up", h_BTD, dropout, out=f)
        if "up" in self.config.biased:
            u_BTf = add_bias(u_BTf, zeros("up_bias", f))
        activate = ACTIVATIONS[self.config.activation]
        gate_BTf = self._linear("gate", h_BTD, dropout, out=f) if self.config.gated else None
        u_BTf = activate(u_BTf) if gate_BTf is None else activate(gate_BTf) * u_BTf
        return self._linear("down", u_BTf, dropout, self._residual_stddev(self.config.ff_size))

    @hk.name_like("__call__")  # else the name of the norm would have that of this method
    def branch(
        self, partial_BTD: Array, products: list[str], dropout: Dropout | None, site: int, post_norm: str = ""
    ) -> Array:
        """Completes a residual branch: biases come after the sum over shards, or they would count mp times."""
        y_BTD = name_sum(axes.reduce(partial_BTD, self.config.sequence_parallel))
        for name in products:
            if name in self.config.biased:
                y_BTD = add_bias(y_BTD, zeros(f"{name}_bias", self.config.d_model))
        if post_norm and self.config.post_norms:
            y_BTD = Norm(self.config, post_norm)(y_BTD)
        return dropout.at(site)(y_BTD) if dropout else y_BTD

    @hk.name_like("__call__")
    def _enter(self, norm, x_BTD):
        """Returns the input of a branch for this shard's products, normed unless all norms follow the branches."""
        h_BTD = Norm(self.config, norm)(x_BTD) if self.config.pre_norms else x_BTD
        return axes.fan_out(h_BTD, self.config.sequence_parallel)

    def _heads(self, name, h_BTD, dropout):
        """Returns this shard's queries, keys or values."""
        h = axes.local(self.config.heads if name == "q" else self.config.key_value_heads) or 1  # or a shared head
        K = self.config.head_size
        y_BTd = self._linear(name, h_BTD, dropout, out=h * K)
        if name in self.config.biased:
            y_BTd = add_bias(y_BTd, zeros(f"{name}_bias", h * K))
        y_BThK = split_heads(y_BTd, h)
        return norm_heads(name, y_BThK, self.config) if name != "v" and self.config.qk_norm != "none" else y_BThK

    def _attend(self, q_BThK, k_BTgK, v_BTgK, context, dropout):
        """Returns weighted values of a sequence's own tokens."""

        def attend_here(q_BThK, k_BSgK, v_BSgK):
            return attend(q_BThK, k_BSgK, v_BSgK, context, dropout if self.config.dropout else None)

        if not context.method.kernel:  # a kernel keeps no weights
            attend_here = recompute_attention(attend_here, self.config)
        return attend_here(q_BThK, k_BTgK, v_BTgK)

    def _linear(self, name, x, dropout, stddev=None, out=None):
        """Returns x[..., I] @ w[I, O] in the compute dtype; O is d_model unless `out` is given."""
        c = self.config
        w = weight(name, [x.shape[-1], out or c.d_model], stddev or c.init_std or 1 / math.sqrt(c.d_model))
        y = name_product(linear(x, w.astype(x.dtype)))
        return y + self._adapter(name, x, y.shape[-1], dropout) if c.lora_rank and name in c.lora_names else y

    def _adapter(self, name, x, out, dropout):
        """Returns (drop(x) @ a) @ b: the sum w + a @ b would cost the backward pass the gradient of the full w.

        The factor beside the split dimension is replicated over mp: the first factor of a column split, the second of
        a row split, whose product joins the partial sums that are added up anyway.
        """
        rank = self.config.adapter_rank(name)
        a = weight(f"{name}{LORA_IN}", [x.shape[-1], rank], stddev=1.0)
        b = weight(f"{name}{LORA_OUT}", [rank, out], stddev=0.0)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)  # their gradients are summed over mp in float32
        a, b = (a, axes.fan_out(b)) if name in ROW_PARALLEL else (axes.fan_out(a), b)
        if dropout and self.config.lora_dropout:
            masks = dropout.at(ADAPTER_SITE + MATRICES.index(name))._replace(rate=self.config.lora_dropout)
            x = masks.features(x, {"o": self.config.attention_size, "down": self.config.ff_size}.get(name, x.shape[-1]))
        x_r = name_product(linear(x, a.astype(x.dtype))) * self.config.adapter_scale(name)
        return linear(x_r, b.astype(x.dtype))

    def _residual_stddev(self, fan_in: int) -> float:
        """Shrinks with depth (GPT-2), so that the residual stream's variance does not grow with the layers."""
        return (self.config.init_std or 1 / math.sqrt(fan_in)) / math.sqrt(2 * self.config.layers)
