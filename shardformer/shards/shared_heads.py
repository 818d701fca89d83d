"""Key/value heads that two or more shards of the model share, because there are fewer heads than shards.

Their parameters are replicated over mp. Each shard slices the columns of the head that its query heads read.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from shardformer import collectives
from shardformer.config.names import LAYERS, MP, OF_KEY_VALUE_HEADS
from shardformer.shards.layer import LayerFeature, LayerInputs


class SharedHeads(LayerFeature):
    """The selection of this shard's key/value head from one layer's parameters."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs with the columns of only this shard's head."""

        def select(name: str, p: Array) -> Array:
            if name not in OF_KEY_VALUE_HEADS:
                return p
            return jax.tree.map(lambda part: _take_columns(part, self.config.model.key_value_heads), p)

        selected = {name: select(name, p) for name, p in inputs.params[LAYERS].items()}
        return inputs._replace(params=inputs.params | {LAYERS: selected})


def _take_columns(p: Array, heads: int) -> Array:
    """Returns the columns of this shard's head; their gradients are summed over mp in float32."""
    size = p.shape[-1] // heads
    p = p.astype(jnp.float32) if jnp.issubdtype(p.dtype, jnp.floating) else p  # codes have no gradient
    head = collectives.index(MP) * heads // lax.axis_size(MP)
    return lax.dynamic_slice_in_dim(collectives.vary_over_mp(p), head * size, size, axis=p.ndim - 1)
