"""Dropout whose masks are a function of the key and of *global* indices, so that they do not depend on the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from shardformer.kernels.blockwise_attention import keep_mask
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
        if self.tokens_split:
            return self._apply(x_BTD, self._keep_own_tokens(*x_BTD.shape[1:]))
        keep_BTD = jax.vmap(lambda example: self._keep(x_BTD.shape[1:], example))(self.example_B)
        return self._apply(x_BTD, keep_BTD)

    def _keep_own_tokens(self, t: int, D: int):
        """Its rows of the masks of all tokens."""
        fold = lambda example: jax.random.key_data(jax.random.fold_in(self.key, example))
        key_B12 = jax.vmap(fold)(self.example_B)[:, None]
        return keep_mask(key_B12, self.rate, axes.offset(t) + jnp.arange(t), jnp.arange(D), D)[:, 0]

    def heads(self, x_BhTS):
        """On split attention weights: each head has its own mask, whichever shard holds it."""
        _, h, *shape = x_BhTS.shape
        head_h = self._heads(h)
        by_head = jax.vmap(lambda example, head: self._keep(shape, example, head), (None, 0))
        keep_BhTS = jax.vmap(lambda example: by_head(example, head_h))(self.example_B)
        return self._apply(x_BhTS, keep_BhTS)

    def head_keys(self, h: int):
        """The keys of those masks as numbers, [B, h, 2]: for attention that draws them block by block."""
        fold = lambda example, head: jax.random.key_data(
            jax.random.fold_in(jax.random.fold_in(self.key, example), head)
        )
        by_head = jax.vmap(fold, (None, 0))
        return jax.vmap(lambda example: by_head(example, self._heads(h)))(self.example_B)

    @staticmethod
    def _heads(h: int):
        return axes.offset(h) + jnp.arange(h)

    def _keep(self, shape, *indices):
        key = self.key
        for index in indices:
            key = jax.random.fold_in(key, index)
        return jax.random.bernoulli(key, 1 - self.rate, tuple(shape))

    def _apply(self, x, keep):
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))
