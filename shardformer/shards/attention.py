"""Causal attention of this shard's heads."""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.kernels.blockwise_attention import attend_in_blocks, block_size
from shardformer.kernels.fused_attention import Hardware, attend_by_kernel, find_obstacle
from shardformer.shards.dropout import Dropout
from shardformer.shards.remat import name_attended, name_weights


class Cache(NamedTuple):
    """The keys and values of one layer, as a new token reads them: those of a head together."""

    k_BhSK: jax.Array
    v_BhSK: jax.Array


class Method(NamedTuple):
    """How attention is computed: all pairs of tokens at once, unless one of these is set."""

    block: int = 0  # tokens of a block, in blockwise attention
    kernel: str = ""  # the platform whose fused kernel is used


def choose_method(config: Config, hardware: Hardware, tokens: int, dropout: bool, documents: bool) -> Method:
    """The devices' kernel where there is one, else blocks from 1,024 tokens on, where they are faster (on a CPU)."""
    if config.attention in ("auto", "fused"):
        obstacle = find_obstacle(hardware, tokens, config.head_size, config.dtype, documents)
        if dropout or config.positions == "t5":
            obstacle = f"there is no kernel with {'dropout' if dropout else 'the bias of positions=t5'}"
        if not obstacle:
            return Method(kernel=hardware.platform)
        if config.attention == "fused":
            raise UsageError(f"attention=fused: {obstacle}; give attention=auto")
    in_blocks = config.attention == "blocks" or (config.attention == "auto" and tokens >= 1024)
    return Method(block=block_size(tokens)) if in_blocks else Method()


class AttentionPositions(NamedTuple):
    """Which tokens attend to which: the same for every layer."""

    query_T: jax.Array  # positions of the queries
    key_S: jax.Array  # positions of the keys: of the same tokens, or of the cache, whose empty slots are below 0
    bias: jax.Array | None = None  # T5's relative bias [1, h, T, S]; in blocks [h, T], by distance
    documents_BT: jax.Array | None = None  # each token's document, where it attends to no other
    method: Method = Method()
    slot: jax.Array | None = None  # of a new token in the cache


def attend_to_cache(q_B1hK, k_B1gK, v_B1gK, cache: Cache, positions: AttentionPositions):
    """Weighted values_B1hK for one new token of each row, and the cache with it; g heads of keys serve h of queries."""
    put = lambda old, new: lax.dynamic_update_slice_in_dim(old, jnp.swapaxes(new, 1, 2), positions.slot, axis=2)
    k_BgSK, v_BgSK = cache = Cache(put(cache.k_BhSK, k_B1gK), put(cache.v_BhSK, v_B1gK))
    B, g, S, K = k_BgSK.shape
    q_BgrK = q_B1hK.reshape(B, g, -1, K)
    logits_BgrS = jnp.einsum("bgrk,bgsk->bgrs", q_BgrK, k_BgSK, preferred_element_type=jnp.float32)
    logits_BgrS = logits_BgrS * np.float32(1 / math.sqrt(K))
    if positions.bias is not None:
        logits_BgrS = logits_BgrS + positions.bias.reshape(1, g, -1, S)
    seen_S = (positions.key_S >= 0) & (positions.key_S <= positions.query_T)
    weights_BgrS = jax.nn.softmax(jnp.where(seen_S[None, None, None], logits_BgrS, -1e30), axis=-1)
    return jnp.einsum("bgrs,bgsk->bgrk", weights_BgrS.astype(q_BgrK.dtype), v_BgSK).reshape(q_B1hK.shape), cache


def attend(q_BThK, k_BShK, v_BShK, positions: AttentionPositions, dropout: Dropout | None):
    """Weighted values_BThK; logits and softmax in float32."""
    if positions.method.kernel:
        return attend_by_kernel(positions.method.kernel, q_BThK, k_BShK, v_BShK, positions.documents_BT)
    if positions.method.block:
        return _attend_in_blocks(q_BThK, k_BShK, v_BShK, positions, dropout)
    scale = np.float32(1 / math.sqrt(q_BThK.shape[-1]))
    logits_BhTS = jnp.einsum("bthk,bshk->bhts", q_BThK, k_BShK, preferred_element_type=jnp.float32) * scale
    if positions.bias is not None:
        logits_BhTS = logits_BhTS + positions.bias
    seen_BhTS = (positions.key_S[None, :] <= positions.query_T[:, None])[None, None]
    if positions.documents_BT is not None:
        seen_BhTS &= (positions.documents_BT[:, :, None] == positions.documents_BT[:, None, :])[:, None]
    weights_BhTS = name_weights(jax.nn.softmax(jnp.where(seen_BhTS, logits_BhTS, -1e30), axis=-1))
    if dropout:
        weights_BhTS = dropout.at(0).heads(weights_BhTS)
    return name_attended(jnp.einsum("bhts,bshk->bthk", weights_BhTS.astype(q_BThK.dtype), v_BShK))


def _attend_in_blocks(q_BThK, k_BShK, v_BShK, positions: AttentionPositions, dropout: Dropout | None):
    heads_first = lambda x: jnp.swapaxes(x, 1, 2)
    q_BhTK, k_BhTK, v_BhTK = map(heads_first, (q_BThK, k_BShK, v_BShK))
    keys, rate = (dropout.at(0).head_keys(q_BhTK.shape[1]), dropout.rate) if dropout else (None, 0.0)
    masks = positions.bias, positions.documents_BT, keys
    return heads_first(attend_in_blocks(q_BhTK, k_BhTK, v_BhTK, *masks, rate, positions.method.block))
