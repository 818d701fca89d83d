"""The position encodings, and what depends on positions: windows and frequencies by layer, restarts of documents."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.registries import Registry
from shardformer.kernels.attention import AttentionOptions
from shardformer.kernels.rotary import find_frequencies
from shardformer.shards.layer import LayerFeature, LayerInputs
from shardformer.shards.parameters import weight

POSITIONS = Registry("shards/positions.py")
T5_BUCKETS = 32
NO_WINDOW = np.iinfo(np.int32).max


def find_rotation(config: Config, long_rows: bool = False) -> np.ndarray:
    """Returns the radians per position of each rotating pair."""
    return POSITIONS[config.model.positions](config, long_rows)


def choose_by_length(options: AttentionOptions, tokens: int | Array, config: Config) -> AttentionOptions:
    """Returns the options of a row of `tokens` tokens with longrope's frequencies for a row of this length."""
    limit = config.model.longest_short_row
    short, long = (find_rotation(config, long_rows) for long_rows in (False, True))
    if isinstance(tokens, Array):
        return options._replace(frequency=jnp.where(tokens > limit, long, short))
    return options._replace(frequency=long if tokens > limit else short)


class Windows(LayerFeature):
    """The window of each layer, and its rotary frequencies if not all layers have the same."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs with the options of this layer's attention."""
        c, options = self.config.model, inputs.options
        if c.window:
            window = _of_layer([window or NO_WINDOW for window in c.layer_windows], layer)
            options = options._replace(window=window, chunk=window if c.window_chunks else None)
        if options.frequency is not None and (c.window_rotary_theta or any(c.layers_without_rotary)):
            frequencies, factors = self._list_rotations(options)
            options = options._replace(frequency=_of_layer(frequencies, layer), rotary_factor=_of_layer(factors, layer))
        if c.qk_norm == "rotated_plain" or c.query_growth_tokens:
            options = options._replace(rotates=_of_layer([not still for still in c.layers_without_rotary], layer))
        return inputs._replace(options=options)

    def _list_rotations(self, options: AttentionOptions) -> tuple[list, list]:
        """Returns the frequencies and the factors of each layer: 0 and 1 in a layer without rotary positions."""
        c = self.config.model
        full = in_window = options.frequency, options.rotary_factor
        if c.window_rotary_theta:
            in_window = find_frequencies(c.rotary_size, c.window_rotary_theta), 1.0
        none = np.zeros(c.rotary_size // 2, np.float32), 1.0
        by_layer = [
            none if without else in_window if window else full
            for window, without in zip(c.layer_windows, c.layers_without_rotary, strict=True)
        ]
        return [frequency for frequency, _ in by_layer], [factor for _, factor in by_layer]


def _of_layer(values: Sequence, layer: int | Array):
    """Returns the value of a layer: a constant if its number is known or all layers have the same value."""
    if isinstance(layer, int):
        return values[layer]
    stacked = np.stack(values)
    return values[0] if (stacked == stacked[:1]).all() else jnp.asarray(stacked)[layer]


def alibi_slopes(heads: int) -> np.ndarray:
    """Returns the slope by which each head's logits fall with a token of distance (ALiBi, Press et al., 2021).

    Computed as transformers does for BLOOM. Of P heads, a power of two, head i has 2**(-8 * i / P). Further heads take
    every other slope of 2P heads.
    """
    power = 2 ** math.floor(math.log2(heads))
    slopes = np.float32(2 ** (-8 / power)) ** np.arange(1, power + 1, dtype=np.float32)
    between = np.float32(2 ** (-4 / power)) ** np.arange(1, 2 * (heads - power), 2, dtype=np.float32)
    return np.concatenate([slopes, between])


def restart_positions(documents_BT: Array) -> Array:
    """Returns positions_BT that start at 0 with every document, for learned positions.

    Rotary positions and T5's bias depend only on distances and need no restart.
    """
    index_BT = jnp.broadcast_to(jnp.arange(documents_BT.shape[1])[None], documents_BT.shape)
    starts_BT = jnp.diff(documents_BT, axis=1, prepend=documents_BT[:, :1]) != 0
    return index_BT - lax.cummax(jnp.where(starts_BT, index_BT, 0), axis=1)


@dataclasses.dataclass
class RelativeBiasShard(hk.Module):
    """The bias of each head and distance, shared by all layers."""

    config: Config
    name: str = "relative_bias"

    def __call__(self, query_T: Array, key_S: Array) -> Array:
        """Returns bias_1hTS for queries and keys at these positions."""
        distance_TS = jnp.maximum(query_T[:, None] - key_S[None, :], 0)
        return POSITIONS[self.config.model.positions](self.config, distance_TS)


# The values of positions=. The parameters of a function show what it returns:
# position_BT: this shard's columns of the vectors that are added to the token embeddings;
# distance_TS: the bias_1hTS of this shard's heads, which is added to the attention logits (a parameter is [rows, h]);
# long_rows: the radians per position of each rotating pair of a head's dimensions.


@POSITIONS.register
def learned(config: Config, position_BT: Array) -> Array:
    shape = [config.model.seq, collectives.local(config.model.d_model)]
    table_Sd = weight("positions", shape, config.model.position_std)
    return table_Sd[position_BT]


@POSITIONS.register
def sinusoids(config: Config, position_BT: Array) -> Array:
    """Returns the sines of each position, then its cosines; the first position is 2, as fairseq's and XGLM's."""
    half, d = config.model.d_model // 2, collectives.local(config.model.d_model)
    frequency = np.exp(np.arange(half, dtype=np.float32) * np.float32(-math.log(10_000) / max(half - 1, 1)))
    column_d = collectives.offset(d) + jnp.arange(d)
    angle_BTd = (position_BT + 2).astype(jnp.float32)[..., None] * jnp.asarray(frequency)[column_d % half][None, None]
    wave_BTd = jnp.where(column_d[None, None] < half, jnp.sin(angle_BTd), jnp.cos(angle_BTd))
    return jnp.where(column_d[None, None] < 2 * half, wave_BTd, 0)


@POSITIONS.register
def rotary(config: Config, long_rows: bool = False) -> np.ndarray:
    """Returns the frequencies of layers without a frequency for windows."""
    model = config.model
    return find_frequencies(model.rotary_size, model.rotary_theta, model.parsed_scaling, long_rows)


@POSITIONS.register
def t5(config: Config, distance_TS: Array) -> Array:
    """Returns a trainable number for each head and bucket of distance."""
    h = collectives.local(config.model.heads)
    table = weight("table", [T5_BUCKETS, h], config.model.position_std)
    bias_TSh = table[bucket_of(distance_TS)]
    return jnp.transpose(bias_TSh, (2, 0, 1))[None]


@POSITIONS.register
def alibi(config: Config, distance_TS: Array) -> Array:
    h = collectives.local(config.model.heads)
    slope_h = lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(config.model.heads)), collectives.offset(h), h)
    return -slope_h[None, :, None, None] * distance_TS.astype(jnp.float32)[None, None]


@POSITIONS.register
def none() -> None:
    """Encodes no positions."""


def bucket_of(distance: Array, buckets: int = T5_BUCKETS, furthest: int = 128) -> Array:
    """Returns the bucket of each distance.

    Half of the buckets are for distances 0, 1, 2, ...; the rest grow in logarithmic steps up to `furthest`.
    """
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, exact).astype(jnp.float32) / exact) / math.log(furthest / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, distance.astype(jnp.int32), jnp.minimum(far, buckets - 1))
