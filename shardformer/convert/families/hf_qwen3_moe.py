"""Qwen3-MoE: `Qwen3MoeForCausalLM`. Qwen3 with experts instead of the feed-forward, in every layer."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import list_experts, without_dense
from shardformer.convert.families.hf_qwen3 import QWEN_3
from shardformer.convert.families.layout import Stored

NAMES = {"expert_gate": "gate_proj", "expert_up": "up_proj", "expert_down": "down_proj"}
EXPERT_NAMES = {
    "experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
    "router_norm": "norm_topk_prob",
}  # fmt: skip


def _layer(c: Config) -> list[Stored]:
    return [*without_dense(QWEN_3.layer(c)), *list_experts(c, "model.layers.{}.mlp", NAMES)]


QWEN_3_MOE = dataclasses.replace(
    QWEN_3,
    architecture="Qwen3MoeForCausalLM",
    names=QWEN_3.names | EXPERT_NAMES,
    defaults=QWEN_3.defaults
    | {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "head_dim": None, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    fixed=QWEN_3.fixed | {"decoder_sparse_step": (1,), "mlp_only_layers": ([], None)},
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes the first
    silent=(*QWEN_3.silent, "output_router_logits", "router_aux_loss_coef"),
)  # fmt: skip
