"""Aria's model of text: `AriaTextForCausalLM`. Llama with experts, some of which every token uses."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts, list_shared, replace_dense
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.layout import Part, Stored, linear, plain

NAMES = {"experts": "moe_num_experts", "experts_per_token": "moe_topk"}
SHARED = "moe_num_shared_experts"


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "moe_num_experts", SHARED)
    return LLAMA.read(theirs) | {"shared_width": theirs[SHARED] * theirs["intermediate_size"]}


def _write(c: Config) -> dict[str, Any]:
    return LLAMA.write(c) | {SHARED: c.experts.shared_width // c.mixture.expert_size}


def _layer(c: Config) -> list[Stored]:
    D, F, E, at = c.model.d_model, c.mixture.expert_size, c.experts.experts, "model.layers.{}.mlp"
    cuts = {"expert_gate": slice(0, F), "expert_up": slice(F, 2 * F)}
    joined = tuple(Part(ours, cut=(slice(None), slice(None), cut)) for ours, cut in cuts.items())
    experts = [
        linear(f"{at}.router", "router", E, D),
        Stored(f"{at}.experts.fc1.weight", (E, D, 2 * F), joined),
        plain(f"{at}.experts.fc2.weight", "expert_down", E, F, D),
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
