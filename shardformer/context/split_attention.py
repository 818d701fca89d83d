"""Attention to the tokens of all shards by a ring or a gather, and the blocks in which either computes."""

import math

import jax.numpy as jnp
from jax import Array, lax

from shardformer.config import Config
from shardformer.config.names import CP
from shardformer.context import gathered, ring
from shardformer.kernels.blockwise_attention import Sight, Sizes, attend_in_blocks, block_size

WAYS = {"ring": ring.attend, "gather": gathered.attend}


def choose_block(config: Config, tokens: int) -> int:
    """Returns the tokens of a block of a shard that has `tokens` tokens: a chunk, or a divisor of it in long rows."""
    chunk = tokens // 2
    if config.attention == "plain" or (config.attention == "auto" and tokens * config.cp < 1024):
        return chunk
    most = block_size(chunk)
    return next(size for size in range(most, 0, -1) if chunk % size == 0)


def attend_in_context(
    way: str, q_BhtK: Array, k_BgtK: Array, v_BgtK: Array, sight: Sight, block: int, rate: float, cap: float | None
) -> Array:
    """Returns weighted values_BhtK of this shard's queries; each of the g key/value heads serves h / g query heads.

    Without a way, this shard has complete rows. A ring with blocks of 0 tokens is computed by a TPU's kernel.
    """
    if not way:
        return attend_in_blocks(q_BhtK, k_BgtK, v_BgtK, sight, block, rate, cap)
    tokens = q_BhtK.shape[2] * lax.axis_size(CP)
    if sight.window is not None:
        sight = sight._replace(window=jnp.minimum(sight.window, tokens))
    if not block:  # the kernel does not scale the logits
        q_BhtK = (q_BhtK.astype(jnp.float32) / math.sqrt(q_BhtK.shape[-1])).astype(q_BhtK.dtype)
    return WAYS[way](q_BhtK, k_BgtK, v_BgtK, sight, Sizes(block, tokens, rate, cap))
