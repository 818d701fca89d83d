"""One transformer layer: this shard's heads and its slice of the feed-forward, one or two all-reduces."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import haiku as hk
import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer import collectives
from shardformer.config import Config
from shardformer.kernels.activations import ACTIVATIONS
from shardformer.kernels.attention import Attention, AttentionOptions, Cache
from shardformer.kernels.linear import linear, split_heads
from shardformer.kernels.remat import PRODUCT, SUM
from shardformer.kernels.rotary import rotate
from shardformer.shards.norm import Norm, norm_heads
from shardformer.shards.parameters import add_bias, weight, zeros


def multiply(name: str, x_BTI: Array, w_IO: Array) -> Array:
    """Returns the product of activations and the matrix of this name, in the activations' dtype."""
    return checkpoint_name(linear(x_BTI, w_IO.astype(x_BTI.dtype)), PRODUCT)


class LayerInputs(NamedTuple):
    """The inputs of one layer besides its activations and its cache."""

    params: dict
    options: AttentionOptions
    multiply: Callable = multiply  # of activations and a matrix, by its name; adapters add to each product
    after_branch: tuple[Callable, ...] = ()  # functions of (y_BTD, site), for example dropout


class LayerFeature:
    """A feature of the layers that changes their inputs; `layer_features.py` chooses those of a configuration."""

    def __init__(self, config: Config):
        self.config = config

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs of a layer, by its number in the model; `masks` are its `Dropout`, or None."""
        raise NotImplementedError


class Records:
    """The arrays that layers return besides their activations. This base class is for layers that return none."""

    def feed_forward(self, stored: dict | None = None) -> Any:
        """Returns the feed-forward of a layer, a function of (the layer, h_BTD); None: the dense one.

        `stored` are the layer's parameters; None: initialises a layer with experts.
        """

    def start(self, x_BTD: Array) -> Any:
        """Returns empty records of all layers for these rows, which a pipeline sends along with them."""

    def add(self, records: Any, of_layers: list, first: Array | int) -> Any:
        """Returns the records with those of the layers `first`, `first + 1`..."""

    def stack(self, of_layers: list) -> Any:
        """Returns the records of all layers."""

    def complete(self, objective: Array, records: Any, constants: Any) -> Array:
        """Returns the objective with the terms that depend on the records."""
        return objective


@dataclasses.dataclass
class TransformerLayerShard(hk.Module):
    """Norms, attention, feed-forward and their biases, in the order that block= gives."""

    config: Config
    method: Attention
    multiply: Callable = multiply
    after_branch: tuple[Callable, ...] = ()
    recompute: Callable | None = None  # wraps attention if its weights are not saved
    sparse: Callable | None = None  # the feed-forward as a function of (this layer, h_BTD); None: the dense one
    name: str = "layers"

    def __call__(self, x_BTD: Array, options: AttentionOptions, cache: Cache | None = None) -> tuple[Array, Cache]:
        """Returns x_BTD after the layer, and the keys and values it attended to (the cache with this token in it)."""
        if self.config.model.block in ("parallel", "parallel_two_norms"):
            two_norms = self.config.model.block == "parallel_two_norms"
            h_BTD = self._enter("attention_norm" if two_norms else "norm", x_BTD)
            attended, cache = self.attention(h_BTD, options, cache)
            if two_norms:
                h_BTD = self._enter("feed_forward_norm", x_BTD)
            partial = attended + self.feed_forward(h_BTD)
            return x_BTD + self.branch(partial, ["o", "down"], site=1), cache

        partial, cache = self.attention(self._enter("attention_norm", x_BTD), options, cache)
        x_BTD = x_BTD + self.branch(partial, ["o"], site=1, post_norm="post_attention_norm")
        x_BTD = self._norm_sum("attention_norm", x_BTD)
        partial = self.feed_forward(self._enter("feed_forward_norm", x_BTD))
        x_BTD = x_BTD + self.branch(partial, ["down"], site=2, post_norm="post_feed_forward_norm")
        return self._norm_sum("feed_forward_norm", x_BTD), cache

    def attention(self, h_BTD: Array, options: AttentionOptions, cache: Cache | None) -> tuple[Array, Cache]:
        """Returns this shard's heads' part of the output projection, a partial sum over mp, and the cache."""
        q_BThK, k_BThK, v_BThK = (self._heads(name, h_BTD) for name in "qkv")
        if options.frequency is not None:
            angles = options.position_T, options.frequency, options.rotary_factor
            q_BThK, k_BThK = (rotate(x, *angles) for x in (q_BThK, k_BThK))
        if self.config.model.qk_norm == "rotated_head":
            q_BThK, k_BThK = norm_heads("q", q_BThK, self.config), norm_heads("k", k_BThK, self.config)
        if self.config.model.qk_norm == "rotated_plain":
            normed = norm_heads("q", q_BThK, self.config), norm_heads("k", k_BThK, self.config)
            q_BThK, k_BThK = (jnp.where(options.rotates, *x) for x in zip(normed, (q_BThK, k_BThK), strict=True))
        q_BThK = self.scale_queries(q_BThK, options)
        if self.config.model.sinks:
            sink_h = zeros("sinks", q_BThK.shape[2]).astype(jnp.float32)
            options = options._replace(sink_1h11=sink_h.reshape(1, -1, 1, 1))
        if cache is None:
            a_BThK = self.attend(q_BThK, k_BThK, v_BThK, options)
            cache = Cache(jnp.swapaxes(k_BThK, 1, 2), jnp.swapaxes(v_BThK, 1, 2))
        else:
            a_BThK, cache = self.method.attend_to_cache(q_BThK, k_BThK, v_BThK, cache, options)
        return self.join_heads(a_BThK), cache

    def scale_queries(self, q_BThK: Array, options: AttentionOptions) -> Array:
        """Returns the queries times attention_scale * sqrt(K), as attention itself divides by sqrt(K).

        With query_growth, those of later positions have larger factors.
        """
        model, position_T = self.config.model, options.position_T
        if model.attention_scale:
            q_BThK = q_BThK * (model.attention_scale * math.sqrt(model.head_size))
        if model.query_growth:
            tokens = model.query_growth_tokens
            contexts_T = (position_T + 1) // tokens if tokens else position_T // model.shorter_context
            growth_T = 1 + model.query_growth * jnp.log(1 + contexts_T.astype(jnp.float32))
            growth_T = jnp.where(options.rotates, 1, growth_T) if tokens else growth_T
            q_BThK = q_BThK * growth_T.astype(q_BThK.dtype)[None, :, None, None]
        return q_BThK

    def join_heads(self, a_BThK: Array) -> Array:
        """Returns this shard's heads' part of the output projection."""
        B, T, h, K = a_BThK.shape
        return self.linear("o", a_BThK.reshape(B, T, h * K), self.residual_stddev(self.config.model.attention_size))

    def feed_forward(self, h_BTD: Array) -> Array:
        """Returns this shard's slice of the hidden layer's contribution: a partial sum over mp."""
        if self.sparse:
            return self.sparse(self, h_BTD)
        f = collectives.local(self.config.model.ff_size)
        u_BTf = self.linear("up", h_BTD, out=f)
        if "up" in self.config.model.biased:
            u_BTf = add_bias(u_BTf, zeros("up_bias", f))
        activate = ACTIVATIONS[self.config.model.activation]
        gate_BTf = self.linear("gate", h_BTD, out=f) if self.config.model.gated else None
        u_BTf = activate(u_BTf) if gate_BTf is None else activate(u_BTf, gate_BTf)
        return self.linear("down", u_BTf, self.residual_stddev(self.config.model.ff_size))

    @hk.name_like("__call__")  # else Haiku adds this method's name to the norm's path
    def branch(self, partial_BTD: Array, products: list[str], site: int, post_norm: str = "") -> Array:
        """Sums a residual branch over mp, then adds the biases of `products`; before, they would count mp times.

        `site` is the number of the branch in its layer, which chooses its dropout mask.
        """
        y_BTD = checkpoint_name(collectives.reduce(partial_BTD, self.config.parallel.sequence_parallel), SUM)
        for name in products:
            if name in self.config.model.biased:
                y_BTD = add_bias(y_BTD, zeros(f"{name}_bias", self.config.model.d_model))
        if post_norm and self.config.model.post_norms:
            y_BTD = Norm(self.config, post_norm)(y_BTD)
        for change in self.after_branch:
            y_BTD = change(y_BTD, site)
        return y_BTD

    @hk.name_like("__call__")
    def _enter(self, norm, x_BTD):
        """Returns the input of a branch for this shard's products, normed unless all norms follow the branches."""
        h_BTD = Norm(self.config, norm)(x_BTD) if self.config.model.pre_norms else x_BTD
        return collectives.fan_out(h_BTD, self.config.parallel.sequence_parallel)

    @hk.name_like("__call__")
    def _norm_sum(self, norm, x_BTD):
        """Returns the residual stream after a branch was added, normed if the block has its norms there."""
        return Norm(self.config, norm)(x_BTD) if self.config.model.sum_norms else x_BTD

    def _heads(self, name, h_BTD):
        """Returns this shard's queries, keys or values."""
        heads = self.config.model.heads if name == "q" else self.config.model.key_value_heads
        h = collectives.local(heads) or 1  # or a shared head
        K = self.config.model.head_size
        y_BTd = self.linear(name, h_BTD, out=h * K)
        if name in self.config.model.biased:
            y_BTd = add_bias(y_BTd, zeros(f"{name}_bias", h * K))
        y_BThK = split_heads(y_BTd, h)
        normed = name != "v" and self.config.model.qk_norm in ("head", "all")
        return norm_heads(name, y_BThK, self.config) if normed else y_BThK

    def attend(self, q_BThK, k_BTgK, v_BTgK, options):
        """Returns weighted values of the sequence's tokens."""

        def attend(q_BThK, k_BSgK, v_BSgK):
            return self.method.attend(q_BThK, k_BSgK, v_BSgK, options)

        return (self.recompute(attend) if self.recompute else attend)(q_BThK, k_BTgK, v_BTgK)

    def linear(self, name, x, stddev=None, out=None):
        """Returns x[..., I] @ w[I, O] in the compute dtype; O is d_model unless `out` is given."""
        c = self.config
        w = weight(
            name, [x.shape[-1], out or c.model.d_model], stddev or c.model.matrix_std or 1 / math.sqrt(c.model.d_model)
        )
        return self.multiply(name, x, w)

    def residual_stddev(self, fan_in: int) -> float:
        """Shrinks with depth (GPT-2), so that the residual stream's variance does not grow with the layers."""
        return (self.config.model.matrix_std or 1 / math.sqrt(fan_in)) / math.sqrt(2 * self.config.model.summed_layers)
