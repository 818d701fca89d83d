"""Mellum 2: `MellumForCausalLM`. Qwen3's experts, with OLMo 3's windows and rotary bases."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts
from shardformer.convert.families.hf_exaone_moe import TYPES, read_mlp_types, write_mlp_types
from shardformer.convert.families.hf_llama import read_head_size
from shardformer.convert.families.hf_olmo3 import OLMO_3
from shardformer.convert.families.hf_qwen3_moe import QWEN_3_MOE
from shardformer.convert.families.layer_types import FULL, SLIDING, check_layers
from shardformer.errors import UsageError

ROPE = {
    FULL: {"rope_type": "default", "rope_theta": 500_000.0},
    SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
}


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "num_experts")
    types = theirs.get("layer_types") or [FULL] * check_layers(theirs)
    ropes = theirs.get("rope_parameters") or ROPE
    for kind in {FULL, SLIDING} & {*types}:
        if "rope_theta" not in (ropes.get(kind) or {}):
            raise UsageError(f"rope_parameters={ropes!r:.80} has no rope_theta of {kind}; give it")
    filled = theirs | {"layer_types": types, "rope_parameters": ropes}
    return OLMO_3.read(filled) | read_head_size(theirs) | read_mlp_types(theirs, dense_first=0)


def _write(c: Config) -> dict[str, Any]:
    return OLMO_3.write(c) | {"head_dim": c.model.head_size, TYPES: write_mlp_types(c)}


def _find_variants(c: Config) -> dict[str, tuple | None]:
    return OLMO_3.variants(c) | {"head_dim": None, "dense_first": None, "expert_pattern": None}


MELLUM = dataclasses.replace(
    QWEN_3_MOE,
    architecture="MellumForCausalLM",
    defaults={key: value for key, value in QWEN_3_MOE.defaults.items() if key not in QWEN_3_MOE.also}
    | {
        "vocab_size": 98_304, "hidden_size": 2304, "intermediate_size": 7168, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "head_dim": 128, "hidden_act": "silu", "max_position_embeddings": 131_072,
        "num_experts": 64, "moe_intermediate_size": 896, "norm_topk_prob": True, "sliding_window": 1024,
    },
    fixed={"attention_bias": (False,)},
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", "head_dim", "rope_parameters", "layer_types", "sliding_window", TYPES),
    silent=("output_router_logits", "router_aux_loss_coef", "num_nextn_predict_layers", "num_mtp_layers",
            "mtp_layer_types", "mtp_mlp_layer_types"),
    predicts_further=True,
    variants=_find_variants,
)  # fmt: skip
