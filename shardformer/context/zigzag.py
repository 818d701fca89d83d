"""The zig-zag order of a row's tokens over `cp`, in which every shard has the same causal work.

A row has 2 * cp chunks. Shard s holds chunk s and its mirror image, chunk 2 * cp - 1 - s:

    cp=4     chunk  0  1  2  3  4  5  6  7
             shard  0  1  2  3  3  2  1  0
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer.config.names import CP


def positions(shard: Array | int, cp: int, tokens: int) -> Array:
    """Returns the positions in the row, [tokens / cp], of a shard's tokens; also in other units than tokens."""
    chunk = tokens // (2 * cp)
    inside = jnp.arange(chunk)
    return jnp.concatenate([shard * chunk + inside, (2 * cp - 1 - shard) * chunk + inside])


def own_positions(tokens: int, cp: int) -> Array:
    """Returns the positions of this shard's tokens in a row of `tokens` tokens."""
    return positions(lax.axis_index(CP), cp, tokens) if cp > 1 else jnp.arange(tokens)


def take_own(x_BT: Array, cp: int) -> Array:
    """Returns this shard's tokens of complete rows."""
    if cp == 1:
        return x_BT
    return take(x_BT, lax.axis_index(CP), cp)


def take(x_BT: Array, shard: Array, cp: int) -> Array:
    """Returns a shard's tokens of complete rows."""
    chunk = x_BT.shape[1] // (2 * cp)
    chunks = [lax.dynamic_slice_in_dim(x_BT, n * chunk, chunk, axis=1) for n in (shard, 2 * cp - 1 - shard)]
    return jnp.concatenate(chunks, axis=1)


def take_own_tokens(batch: dict, cp: int) -> dict:
    """Returns a batch of complete rows with this shard's tokens; `documents`, which attention needs, stay complete."""
    return {name: take_own(x, cp) if x.ndim > 1 and name != "documents" else x for name, x in batch.items()}


def to_rows(x: Array, axis: int) -> Array:
    """Returns complete rows from the tokens of all shards, one shard after the other, along `axis`."""
    cp = lax.axis_size(CP)
    parts = _split(x, axis, (cp, 2))
    first, mirrored = (lax.index_in_dim(parts, half, axis + 1, keepdims=False) for half in (0, 1))
    return _merge(jnp.concatenate([first, lax.rev(mirrored, (axis,))], axis), axis)


def to_shards(x: Array, axis: int) -> Array:
    """Inverts `to_rows`."""
    cp = lax.axis_size(CP)
    parts = _split(x, axis, (2, cp))
    first, mirrored = (lax.index_in_dim(parts, half, axis, keepdims=False) for half in (0, 1))
    return _merge(_merge(jnp.stack([first, lax.rev(mirrored, (axis,))], axis + 1), axis), axis)


def gather(tree, axis: int):
    """Returns complete rows, in the order of the text, of arrays of which each shard has its own tokens."""
    return jax.tree.map(lambda x: to_rows(lax.all_gather(x, CP, axis=axis, tiled=True), axis), tree)


def join_rows(tree, cp: int):
    """Returns complete rows of arrays [B, T / cp, ...], the same on every shard."""

    def join(x_Bt):
        return to_rows(lax.all_gather(x_Bt, CP, axis=1, tiled=True, to="invarying"), 1)

    return jax.tree.map(join, tree) if cp > 1 else tree


def take_token(x_BtD: Array, position: Array, cp: int) -> Array:
    """Returns the row's token x_B1D at a position, the same on every shard."""
    if cp == 1:
        return lax.dynamic_slice_in_dim(x_BtD, position, 1, axis=1)
    is_it_t = own_positions(x_BtD.shape[1] * cp, cp) == position
    return lax.psum(jnp.where(is_it_t[None, :, None], x_BtD, 0).sum(1, keepdims=True), CP)


def round_up(tokens: int, cp: int) -> int:
    """Returns the least number of tokens that split over cp."""
    return -(-tokens // (2 * cp)) * 2 * cp if cp > 1 else tokens


def _split(x: Array, axis: int, parts: tuple[int, int]) -> Array:
    return x.reshape(*x.shape[:axis], *parts, -1, *x.shape[axis + 1 :])


def _merge(x: Array, axis: int) -> Array:
    return x.reshape(*x.shape[:axis], -1, *x.shape[axis + 2 :])
