"""Sarvam's models with latents: DeepSeek-V3 in `DeepseekV3ForCausalLM`, and other names in its first files."""

import dataclasses
from typing import Any

from shardformer.convert.families.hf_deepseek import DEEPSEEK_V3

_YARN = "deepseek_yarn"  # the first files' name of yarn


def _read(theirs: dict) -> dict[str, Any]:
    rope = theirs.get("rope_scaling") or {}
    if _YARN in (rope.get("type"), rope.get("rope_type")):
        rope = {key: value for key, value in rope.items() if key != "type"} | {"rope_type": "yarn"}
    # The first files' head_dim is the number that a token caches; transformers derives it.
    return DEEPSEEK_V3.read(theirs | {"rope_scaling": rope, "head_dim": None})


SARVAM_MLA = dataclasses.replace(
    DEEPSEEK_V3,
    defaults=DEEPSEEK_V3.defaults
    | {
        "vocab_size": 262_144, "hidden_size": 4096, "intermediate_size": 16_384, "num_hidden_layers": 32,
        "num_attention_heads": 64, "num_key_value_heads": None, "q_lora_rank": None, "n_routed_experts": 128,
        "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1,
    },
    read=_read,
    aliases=DEEPSEEK_V3.aliases | {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
    silent=(*DEEPSEEK_V3.silent, "q_head_dim"),
)  # fmt: skip
