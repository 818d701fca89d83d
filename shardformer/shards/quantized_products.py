"""The products of activations with quantised matrices of a layer."""

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer.kernels.packed import PackedMatrix
from shardformer.kernels.quantized import Int8Matrix
from shardformer.kernels.remat import PRODUCT
from shardformer.shards.dropout import Dropout
from shardformer.shards.layer import LayerFeature, LayerInputs


class QuantizedProducts(LayerFeature):
    """The products with a layer's matrices that are stored as codes and scales."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Dropout | None) -> LayerInputs:
        """Returns the inputs with products that dequantise."""
        return inputs._replace(multiply=multiply)


def multiply(name: str, x_BTI: Array, w_IO: Int8Matrix | PackedMatrix) -> Array:
    """Returns the product of activations and the quantised matrix of this name, in the activations' dtype."""
    return checkpoint_name(w_IO.multiply(x_BTI), PRODUCT)
