"""Aria's model of text: `AriaTextForCausalLM`. Llama with experts, some of which every token uses."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts, list_joined_by_inputs, list_shared, replace_dense
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.layout import Stored, linear

NAMES = {"experts": "moe_num_experts", "experts_per_token": "moe_topk"}
SHARED = "moe_num_shared_experts"


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "moe_num_experts", SHARED)
    return LLAMA.read(theirs) | {"shared_width": theirs[SHARED] * theirs["intermediate_size"]}


def _write(c: Config) -> dict[str, Any]:
    return LLAMA.write(c) | {SHARED: c.experts.shared_width // c.mixture.expert_size}


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.mlp"
    experts = [
        linear(f"{at}.router", "router", c.experts.experts, c.model.d_model),
        *list_joined_by_inputs(c, f"{at}.experts.fc1.weight", f"{at}.experts.fc2.weight"),
        *list_shared(c, f"{at}.shared_experts"),
    ]
    return replace_dense(c, LLAMA.layer(c), experts)


def _find_variants(c: Config) -> dict[str, tuple | None]:
    size = c.mixture.expert_size
    return LLAMA.variants(c) | {"shared_width": (max(c.experts.shared_width // size, 1) * size,)}


ARIA = dataclasses.replace(
    LLAMA,
    architecture="AriaTextForCausalLM",
    names=LLAMA.names | NAMES,
    defaults=LLAMA.defaults
    | {"intermediate_size": 4096, "moe_num_experts": 8, "moe_topk": 2, SHARED: 2, "pad_token_id": 2},
    read=_read,
    write=_write,
    layer=_layer,
    variants=_find_variants,
)
