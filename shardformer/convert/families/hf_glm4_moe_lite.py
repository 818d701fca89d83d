"""GLM-4.7-Flash: `Glm4MoeLiteForCausalLM`. DeepSeek-V3 that names the kind of each layer's feed-forward."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.hf_deepseek import DEEPSEEK_V3
from shardformer.convert.families.hf_exaone_moe import TYPES, read_mlp_types, write_mlp_types
from shardformer.errors import UsageError

_DENSE_FIRST = "first_k_dense_replace"  # of files from before transformers had the class, which does not read it


def _read(theirs: dict) -> dict[str, Any]:
    result = read_mlp_types(theirs, dense_first=1)
    said = theirs.get(_DENSE_FIRST)
    if theirs.get(TYPES) is None and said not in (None, 1):
        raise UsageError(f"{_DENSE_FIRST}={said!r:.80} is not computed here without {TYPES}; expected 1")
    return DEEPSEEK_V3.read(theirs) | result


def _write(c: Config) -> dict[str, Any]:
    return DEEPSEEK_V3.write(c) | {TYPES: write_mlp_types(c)}


def _find_variants(c: Config) -> dict[str, tuple | None]:
    return DEEPSEEK_V3.variants(c) | {"expert_pattern": None}


GLM_4_MOE_LITE = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Glm4MoeLiteForCausalLM",
    names={ours: theirs for ours, theirs in DEEPSEEK_V3.names.items() if theirs != _DENSE_FIRST},
    defaults={key: value for key, value in DEEPSEEK_V3.defaults.items() if key != _DENSE_FIRST}
    | {
        "vocab_size": 154_880, "hidden_size": 2048, "intermediate_size": 10_240, "num_hidden_layers": 47,
        "num_attention_heads": 20, "num_key_value_heads": 20, "max_position_embeddings": 202_752,
        "rms_norm_eps": 1e-5, "q_lora_rank": 768, "v_head_dim": 256, "qk_nope_head_dim": 192,
        "moe_intermediate_size": 1536, "n_routed_experts": 64, "num_experts_per_tok": 4, "routed_scaling_factor": 1.8,
        "n_group": 1, "topk_group": 1,
    },
    read=_read,
    write=_write,
    also=(*DEEPSEEK_V3.also, TYPES, _DENSE_FIRST),
    variants=_find_variants,
)  # fmt: skip
