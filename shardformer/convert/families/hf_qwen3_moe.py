"""Qwen3-MoE: `Qwen3MoeForCausalLM`. Qwen3 with experts instead of the feed-forward, in all layers or in some."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import (
    DENSE_LAYERS,
    QWEN_NAMES,
    check_experts,
    list_experts,
    read_dense_layers,
    replace_dense,
    write_dense_layers,
)
from shardformer.convert.families.hf_qwen3 import QWEN_3
from shardformer.convert.families.layout import Stored

EXPERT_NAMES = {
    "experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
    "router_norm": "norm_topk_prob",
}  # fmt: skip


def _layer(c: Config) -> list[Stored]:
    return replace_dense(c, QWEN_3.layer(c), list_experts(c, "model.layers.{}.mlp", QWEN_NAMES))


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_experts")
    return QWEN_3.read(theirs) | read_dense_layers(theirs)


def _write(c: Config) -> dict:
    return QWEN_3.write(c) | write_dense_layers(c)


def _list_variants(c: Config) -> dict[str, Any]:
    return QWEN_3.variants(c) | {"dense_first": None, "expert_pattern": None}


QWEN_3_MOE = dataclasses.replace(
    QWEN_3,
    architecture="Qwen3MoeForCausalLM",
    names=QWEN_3.names | EXPERT_NAMES,
    defaults=QWEN_3.defaults
    | {
        "vocab_size": 151_936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_key_value_heads": 4, "head_dim": None, "num_experts": 128, "num_experts_per_tok": 8,
        "moe_intermediate_size": 768, "norm_topk_prob": False, "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    read=_read,
    write=_write,
    also=(*QWEN_3.also, *DENSE_LAYERS),
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},  # transformers 5 writes the first
    silent=(*QWEN_3.silent, "output_router_logits", "router_aux_loss_coef"),
    variants=_list_variants,
)  # fmt: skip
