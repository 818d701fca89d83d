"""Qwen2-MoE and Qwen1.5-MoE: `Qwen2MoeForCausalLM`. Qwen2 with experts, one of which every token uses."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import (
    DENSE_LAYERS,
    QWEN_NAMES,
    check_experts,
    list_experts,
    list_shared,
    read_dense_layers,
    replace_dense,
    write_dense_layers,
)
from shardformer.convert.families.hf_qwen2 import QWEN_2
from shardformer.convert.families.hf_qwen3_moe import EXPERT_NAMES
from shardformer.convert.families.layout import Stored

SHARED_WIDTH = "shared_expert_intermediate_size"


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.mlp"
    return replace_dense(c, QWEN_2.layer(c), [*list_experts(c, at, QWEN_NAMES), *list_shared(c, f"{at}.shared_expert")])


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_experts", SHARED_WIDTH)
    return QWEN_2.read(theirs) | read_dense_layers(theirs)


def _write(c: Config) -> dict:
    return QWEN_2.write(c) | write_dense_layers(c)


def _list_variants(c: Config) -> dict[str, Any]:
    return QWEN_2.variants(c) | {"dense_first": None, "expert_pattern": None}


QWEN_2_MOE = dataclasses.replace(
    QWEN_2,
    architecture="Qwen2MoeForCausalLM",
    names=QWEN_2.names | EXPERT_NAMES | {"shared_width": SHARED_WIDTH},
    defaults=QWEN_2.defaults
    | {
        "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24, "num_attention_heads": 16,
        "num_key_value_heads": 16, "num_experts": 60, "num_experts_per_tok": 4, "moe_intermediate_size": 1408,
        "norm_topk_prob": False, SHARED_WIDTH: 5632, "decoder_sparse_step": 1, "mlp_only_layers": None,
    },
    fixed=QWEN_2.fixed | {"qkv_bias": (True,)},
    ours=QWEN_2.ours | {"shared_gate": True},
    read=_read,
    write=_write,
    also=(*QWEN_2.also, *DENSE_LAYERS),
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},
    silent=(*QWEN_2.silent, "output_router_logits", "router_aux_loss_coef"),
    variants=_list_variants,
)  # fmt: skip
