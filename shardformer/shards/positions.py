"""Rotary frequencies, positions of documents, and T5's relative bias (learned positions are in the embedding)."""

import dataclasses
import math
from collections.abc import Sequence

import haiku as hk
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from shardformer.config import Config, parsing
from shardformer.kernels.alibi import alibi_slopes
from shardformer.shards import axes
from shardformer.shards.parameters import weight

NO_WINDOW = np.iinfo(np.int32).max


def attention_window(config: Config, layer: int | Array) -> int | Array:
    """Returns the tokens that a layer attends to: its own and the last ones before it."""
    return _of_layer([window or NO_WINDOW for window in config.layer_windows], layer)


def rotary_frequencies(config: Config, layer: int | Array = 0) -> np.ndarray | Array:
    """Returns radians per position of each rotating pair of a layer, in float32 as Llama's authors compute them."""
    frequency = _frequencies(config.rotary_size, config.rotary_theta, config.rotary_scaling)
    if not config.window_rotary_theta:
        return frequency
    in_window = _frequencies(config.rotary_size, config.window_rotary_theta, scaling="")
    return _of_layer([in_window if window else frequency for window in config.layer_windows], layer)


def _of_layer(values: Sequence, layer: int | Array):
    """Returns the value of a layer: a constant if its number is known or all layers have the same value."""
    if isinstance(layer, int):
        return values[layer]
    stacked = np.stack(values)
    return values[0] if (stacked == stacked[:1]).all() else jnp.asarray(stacked)[layer]


def _frequencies(size: int, theta: float, scaling: str) -> np.ndarray:
    frequency = np.float32(1) / np.float32(theta) ** (np.arange(0, size, 2, dtype=np.float32) / size)
    found = parsing.parse_rotary_scaling(scaling)
    if found is None:
        return frequency
    stretched = frequency / np.float32(found.factor)
    if found.kind == "linear":
        return stretched
    kept = _share_kept_by_yarn(size, theta, found) if found.kind == "yarn" else _share_kept(frequency, found)
    return (1 - kept) * stretched + kept * frequency


def _share_kept(frequency: np.ndarray, scaling: parsing.RotaryScaling) -> np.ndarray:
    """Returns llama3's share: linear in the turns of each pair within the first training's context."""
    turns_before = np.float32(scaling.old_seq) * frequency / np.float32(2 * math.pi)
    return np.clip((turns_before - scaling.low) / np.float32(scaling.high - scaling.low), 0, 1).astype(np.float32)


def _share_kept_by_yarn(size: int, theta: float, scaling: parsing.RotaryScaling) -> np.ndarray:
    """Returns YaRN's share: linear in the number of the pair, as transformers computes it."""

    def pair_with(turns: float) -> float:
        return size * math.log(scaling.old_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first = max(math.floor(pair_with(scaling.high)), 0)
    last = min(math.ceil(pair_with(scaling.low)), size - 1)
    stretched = (np.arange(size // 2, dtype=np.float32) - first) / np.float32(last - first or 0.001)
    return 1 - np.clip(stretched, 0, 1)


def restart_positions(documents_BT: Array) -> Array:
    """Returns positions_BT that begin at 0 with every document, for learned positions.

    Rotary positions and T5's bias depend only on distances and need no restart.
    """
    index_BT = jnp.broadcast_to(jnp.arange(documents_BT.shape[1])[None], documents_BT.shape)
    begins_BT = jnp.diff(documents_BT, axis=1, prepend=documents_BT[:, :1]) != 0
    return index_BT - lax.cummax(jnp.where(begins_BT, index_BT, 0), axis=1)


@dataclasses.dataclass
class RelativeBiasShard(hk.Module):
    """T5's bias: a learned number for each head and bucket of distance, shared by all layers; or ALiBi's."""

    config: Config
    name: str = "relative_bias"

    def __call__(self, query_T: Array, key_S: Array) -> Array:
        """Returns bias_1hTS for queries and keys at these positions."""
        h, buckets = axes.local(self.config.heads), self.config.t5_buckets
        distance_TS = jnp.maximum(query_T[:, None] - key_S[None, :], 0)
        if self.config.positions == "alibi":
            slope_h = lax.dynamic_slice_in_dim(jnp.asarray(alibi_slopes(self.config.heads)), axes.offset(h), h)
            return -slope_h[None, :, None, None] * distance_TS.astype(jnp.float32)[None, None]
        table = weight("table", [buckets, h], self.config.init_std or 1 / math.sqrt(self.config.d_model))
        bias_TSh = table[bucket_of(distance_TS, buckets)]
        return jnp.transpose(bias_TSh, (2, 0, 1))[None]


def bucket_of(distance: Array, buckets: int, furthest: int = 128) -> Array:
    """Returns the bucket of each distance.

    Half of the buckets are for distances 0, 1, 2, ...; the others grow in logarithmic steps up to `furthest`.
    """
    exact = buckets // 2
    ratio = jnp.log(jnp.maximum(distance, exact).astype(jnp.float32) / exact) / math.log(furthest / exact)
    far = exact + (ratio * (buckets - exact)).astype(jnp.int32)
    return jnp.where(distance < exact, distance.astype(jnp.int32), jnp.minimum(far, buckets - 1))
