"""Dropout whose masks depend on the key and on *global* indices, and therefore not on the mesh."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.kernels.threefry import keep_mask
from shardformer.shards.layer import LayerFeature, LayerInputs


class Dropout(NamedTuple):
    """The masks of one site. `at` derives those of a layer, and of a site within the layer."""

    rate: float
    key: Array
    example_B: Array  # each row's index in the global batch
    tokens_split: bool = False  # activations are this shard's part of every sequence
    position_T: Array | None = None  # of the tokens of a shard of the context; None: all positions in order

    def at(self, index) -> "Dropout":
        return self._replace(key=jax.random.fold_in(self.key, index))

    def __call__(self, x_BTD: Array) -> Array:
        """Drops values of a replicated activation, where all shards draw one mask, or of this shard's tokens."""

        _, T, D = x_BTD.shape
        row_T = (collectives.offset(T) if self.tokens_split else 0) + jnp.arange(T)
        return self._drop(x_BTD, row_T, jnp.arange(D), D)

    def after_branch(self, y_BTD: Array, site: int) -> Array:
        """Drops values of a residual branch, each of which is a site of its layer."""
        return self.at(site)(y_BTD)

    def features(self, x_BTd: Array, D: int) -> Array:
        """Drops inputs of a product, for all tokens: all D features of a token, or this shard's d of them."""
        _, T, d = x_BTd.shape
        column_d = (collectives.offset(d) if d < D else 0) + jnp.arange(d)
        return self._drop(x_BTd, jnp.arange(T), column_d, D)

    def heads(self, x_BhTS: Array, first: int = 0, columns: int = 0) -> Array:
        """Drops attention weights: each head has a separate mask, on whichever shard it is.

        The weights may be rows from `first` on, and the first S of all `columns`.
        """
        _, h, T, S = x_BhTS.shape
        row_T = first + jnp.arange(T)
        return self._apply(x_BhTS, keep_mask(self.head_keys(h), self.rate, row_T, jnp.arange(S), columns or S))

    def head_keys(self, h: int) -> Array:
        """Returns the keys of this shard's heads as numbers, [B, h, 2]; blockwise attention draws parts of masks."""

        def derive_key(example, head):
            return jax.random.key_data(jax.random.fold_in(jax.random.fold_in(self.key, example), head))

        head_h = collectives.offset(h) + jnp.arange(h)
        return jax.vmap(lambda example: jax.vmap(derive_key, (None, 0))(example, head_h))(self.example_B)

    def _drop(self, x_BTD, row_T, column_D, columns):
        def derive_key(example):
            return jax.random.key_data(jax.random.fold_in(self.key, example))

        if not self.rate:
            return x_BTD
        key_B12 = jax.vmap(derive_key)(self.example_B)[:, None]
        row_T = row_T if self.position_T is None else self.position_T[row_T]
        return self._apply(x_BTD, keep_mask(key_B12, self.rate, row_T, column_D, columns)[:, 0])

    def _apply(self, x, keep):
        return jnp.where(keep, x / (1 - self.rate), jnp.zeros_like(x))


class DroppedBranches(LayerFeature):
    """Dropout of the attention weights and of the residual branches."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Dropout | None) -> LayerInputs:
        """Returns the inputs with this layer's masks; without masks, unchanged."""
        if masks is None:
            return inputs
        after_branch = (*inputs.after_branch, masks.after_branch)
        return inputs._replace(options=inputs.options._replace(dropout=masks), after_branch=after_branch)
