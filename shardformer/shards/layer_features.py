"""The features of the layers that a configuration switches on, and the records that they give."""

from typing import Any

from jax import Array
from jax.ad_checkpoint import checkpoint_name

from shardformer.config import Config
from shardformer.kernels.remat import PRODUCT
from shardformer.layout import Layout
from shardformer.shards.dropout import DroppedBranches
from shardformer.shards.layer import LayerFeature, LayerInputs, Records, TransformerLayerShard
from shardformer.shards.positions import Windows


class ScaledBranches(LayerFeature):
    """The factor of each residual branch with its biases, as Granite and `scale` have it."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs with the factor after each branch."""
        return inputs._replace(after_branch=(*inputs.after_branch, self._scale))

    def _scale(self, y_BTD: Array, site: int) -> Array:
        return y_BTD * self.config.model.branch_scale


class QuantizedProducts(LayerFeature):
    """The products with a layer's matrices that are stored as codes and scales."""

    def change(self, inputs: LayerInputs, layer: int | Array, masks: Any) -> LayerInputs:
        """Returns the inputs with products that dequantise."""
        return inputs._replace(multiply=self._multiply)

    @staticmethod
    def _multiply(name: str, x_BTI: Array, w_IO: Any) -> Array:
        return checkpoint_name(w_IO.multiply(x_BTI), PRODUCT)


def choose_features(config: Config) -> tuple[LayerFeature, ...]:
    """Returns the features of a configuration's layers, in their order; () for plain layers."""
    features: list[LayerFeature] = []
    if config.shares_kv_heads:
        from shardformer.shards.shared_heads import SharedHeads

        features.append(SharedHeads(config))
    if config.model.window or any(config.model.layers_without_rotary):
        features.append(Windows(config))
    if config.model.branch_scale != 1:
        features.append(ScaledBranches(config))
    if config.training.dropout:
        features.append(DroppedBranches(config))
    if config.stored.quantized:
        features.append(QuantizedProducts(config))
    if config.lora.lora_rank:
        from shardformer.adapters.adapter_layer import AdaptedProducts

        features.append(AdaptedProducts(config))
    return tuple(features)


def choose_layer(config: Config) -> type[TransformerLayerShard]:
    """Returns the module of a layer."""
    if not config.model.kv_latent:
        return TransformerLayerShard
    from shardformer.shards.latent_attention import LatentLayerShard

    return LatentLayerShard


def choose_records(layout: Layout) -> Records:
    """Returns the records of a layout's layers; plain layers give none."""
    if not layout.config.experts.experts:
        return Records()
    from shardformer.experts.expert_layer import RoutesOfLayers  # not imported without experts

    return RoutesOfLayers(layout)


def choose_mixed_layers(config: Config) -> Any:
    """Returns the functions of layers with different parameters; None if all layers have the same."""
    if not config.mixture.mixes_layers:
        return None
    from shardformer.shards.mixed_layers import MixedLayers  # not imported without experts

    return MixedLayers(config)
