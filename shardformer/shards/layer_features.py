"""The features of the layers that a configuration switches on."""

from shardformer.config import Config
from shardformer.shards.adapters import AdaptedProducts
from shardformer.shards.dropout import DroppedBranches
from shardformer.shards.layer import LayerFeature
from shardformer.shards.positions import Windows
from shardformer.shards.scaled_branches import ScaledBranches
from shardformer.shards.shared_heads import SharedHeads


def choose_features(config: Config) -> tuple[LayerFeature, ...]:
    """Returns the features of a configuration's layers, in their order; () for plain layers."""
    features: list[LayerFeature] = []
    if config.shares_kv_heads:
        features.append(SharedHeads(config))
    if config.model.window or any(config.model.layers_without_rotary):
        features.append(Windows(config))
    if config.model.residual_scale != 1:
        features.append(ScaledBranches(config))
    if config.training.dropout:
        features.append(DroppedBranches(config))
    if config.stored.quantized:
        from shardformer.shards.quantized_products import QuantizedProducts

        features.append(QuantizedProducts(config))
    if config.lora.lora_rank:
        features.append(AdaptedProducts(config))
    return tuple(features)
