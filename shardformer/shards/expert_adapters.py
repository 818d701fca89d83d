"""LoRA's adapters of experts: each expert has a pair of factors, [experts, inputs, rank] and [experts, rank, outputs].

Both products with the factors are grouped products of the same rows as the product with the matrix.
"""

import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config.names import LORA_IN, LORA_OUT
from shardformer.shards.experts import ExpertFeedForward
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.parameters import weight


class AdaptedExperts(ExpertFeedForward):
    """The feed-forward of a layer whose experts have adapters."""

    def read_weights(self, layer: TransformerLayerShard, D: int) -> dict[str, Array]:
        """Returns the matrices of the experts, and the factors of their adapters in float32."""
        weights = super().read_weights(layer, D)
        for name in self.config.lora.lora_names:
            if name not in weights:
                continue
            rank, (experts, inputs, outputs) = self.config.lora.adapters[name].rank, weights[name].shape
            a = weight(f"{name}{LORA_IN}", [experts, inputs, rank], stddev=1.0).astype(jnp.float32)
            b = weight(f"{name}{LORA_OUT}", [experts, rank, outputs], stddev=0.0).astype(jnp.float32)
            if not self.config.splits_experts:
                # As in adapters.py: the factor next to the dimension that is not split is replicated over mp.
                a, b = (a, collectives.fan_out(b)) if name == "expert_down" else (collectives.fan_out(a), b)
            weights |= {f"{name}{LORA_IN}": a, f"{name}{LORA_OUT}": b}
        return weights

    def multiply(self, name: str, weights: dict[str, Array], x_MI: Array, size_E: Array) -> Array:
        """Returns the product with each row's expert, and with the expert's adapter if the matrix has one."""
        y_MO = super().multiply(name, weights, x_MI, size_E)
        if name not in self.config.lora.lora_names:
            return y_MO
        x_Mr = super().multiply(f"{name}{LORA_IN}", weights, x_MI, size_E) * self.config.lora.adapter_scale(name)
        return y_MO + super().multiply(f"{name}{LORA_OUT}", weights, x_Mr, size_E)
