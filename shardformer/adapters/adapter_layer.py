"""LoRA's adapters: a product with a matrix, and the product with the two factors next to it."""

import dataclasses
from collections.abc import Callable

import jax.numpy as jnp
from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer import collectives
from shardformer.config import Config
from shardformer.config.names import LORA_IN, LORA_OUT, MATRICES, SHARED_MATRICES
from shardformer.kernels.linear import linear
from shardformer.kernels.remat import PRODUCT
from shardformer.shards.dropout import Dropout
from shardformer.shards.layer import LayerFeature, LayerInputs, multiply
from shardformer.shards.parameters import weight

FIRST_SITE = 3  # the number of the first matrix among a layer's sites of dropout
SITES = (*MATRICES, *SHARED_MATRICES)
ROW_PARALLEL = ("o", "down", "shared_down")  # split by inputs: their products are partial sums


@dataclasses.dataclass(frozen=True)
class Adapters:
    """The adapters of one layer, and the masks of their inputs."""

    config: Config
    dropout: Dropout | None = None
    product: Callable = multiply  # with the matrix, which may be quantised

    def multiply(self, name: str, x: Array, w: Array) -> Array:
        """Returns the product with the matrix of this name, and with its adapter if it has one.

        The adapter gives (drop(x) @ a) @ b: the sum w + a @ b would cost the backward pass the gradient of the full w.
        The factor next to the split dimension is replicated over mp: the first factor of a column split, the second of
        a row split, whose product joins the partial sums that are added up anyway.
        """
        y = self.product(name, x, w)
        if name not in self.config.lora.lora_names:
            return y
        rank, out = self.config.lora.adapters[name].rank, y.shape[-1]
        a = weight(f"{name}{LORA_IN}", [x.shape[-1], rank], stddev=1.0)
        b = weight(f"{name}{LORA_OUT}", [rank, out], stddev=0.0)
        a, b = a.astype(jnp.float32), b.astype(jnp.float32)  # their gradients are summed over mp in float32
        a, b = (a, collectives.fan_out(b)) if name in ROW_PARALLEL else (collectives.fan_out(a), b)
        x_r = checkpoint_name(linear(self._drop(name, x), a.astype(x.dtype)), PRODUCT) * self.config.lora.adapter_scale(
            name
        )
        return y + linear(x_r, b.astype(x.dtype))

    def _drop(self, name: str, x: Array) -> Array:
        if not self.dropout or not self.config.lora.lora_dropout:
            return x
        masks = self.dropout.at(FIRST_SITE + SITES.index(name))._replace(rate=self.config.lora.lora_dropout)
        return masks.features(x, self.config.split_inputs(name) or x.shape[-1])


class AdaptedProducts(LayerFeature):
    """The products with a layer's matrices and their adapters."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Dropout | None) -> LayerInputs:
        """Returns the inputs with the products of adapted matrices."""
        return inputs._replace(multiply=Adapters(self.config, masks, inputs.multiply).multiply)
