"""Dropout whose masks are a function of the key and of *global* indices, so that they do not depend on the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardformer.kernels.dropout_mask import keep_mask
from shardformer.shards import axes


class Dropout(NamedTuple):
    """One site's masks. `at` derives the key of a layer, and of a site within it."""

    rate: float
    key: jax.Array
    example_B: jax.Array  # each row's index in the global batch
    tokens_split: bool = False  # activations are this shard's part of every sequence

    def at(self, index) -> "Dropout":
        return self._replace(key=jax.random.fold_in(self.key, index))

    def __call__(self, x_BTD):
        """On a replicated activation, where every shard draws the same mask, or on its part of the tokens."""
        _, T, D = x_BTD.shape
        fold = lambda example: jax.random.key_data(jax.random.fold_in(self.key, example))
        key_B12 = jax.vmap(fold)(self.example_B)[:, None]
        first = axes.offset(T) if self.tokens_split else 0
        return self._apply(x_BTD, keep_mask(key_B12, self.rate, first + jnp.arange(T), jnp.arange(D), D)[:, 0])

    def heads(self, x_BhTS):
        """On split attention weights: each head has its own mask, whichever shard holds it."""
        _, h, T, S = x_BhTS.shape
        return self._apply(x_BhTS, keep_mask(self.head_keys(h), self.rate, jnp.arange(T), jnp.arange(S), S))

    def head_keys(self, h: int):
        """The keys of those masks as numbers, [B, h, 2]: attention in blocks draws parts of them."""
        fold = lambda example, head: jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(self.key, example), head)
        )
        by_head = jax.vmap(fold, (None, 0))
        return jax.vmap(lambda example: by_head(example, axes.offset(h) + jnp.arange(h)))(self.example_B)

    def _apply(self, x, keep):
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))
