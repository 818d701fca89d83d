"""Hy3: `HYV3ForCausalLM`. Qwen3 with experts of which sigmoids with balanced biases choose."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.balanced_experts import read_balanced, write_balanced
from shardformer.convert.families.expert_arrays import QWEN_NAMES, list_experts, list_shared, replace_dense
from shardformer.convert.families.hf_exaone_moe import SHARED, TYPES, read_mlp_types, write_mlp_types
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_qwen3 import QWEN_3
from shardformer.convert.families.layout import Stored, plain, rename

NAMES = {
    "experts": "num_experts", "experts_per_token": "num_experts_per_tok", "expert_width": "moe_intermediate_size",
    "router_scale": "router_scaling_factor",
}  # fmt: skip


def _read(theirs: dict) -> dict[str, Any]:
    return LLAMA.read(theirs) | read_balanced(theirs, NAMES, SHARED) | read_mlp_types(theirs, dense_first=1)


def _write(c: Config) -> dict[str, Any]:
    return LLAMA.write(c) | write_balanced(c, SHARED) | {TYPES: write_mlp_types(c)}


def _layer(c: Config) -> list[Stored]:
    """Lists the arrays by their published names, which transformers writes too."""
    at = "model.layers.{}.mlp"
    experts = [
        *rename(list_experts(c, at, QWEN_NAMES), {r"mlp\.gate\.weight": "mlp.router.gate.weight"}),
        plain(f"{at}.expert_bias", "router_bias", c.experts.experts),
        *list_shared(c, f"{at}.shared_mlp"),
    ]
    return replace_dense(c, QWEN_3.layer(c), experts)


HY_V3 = dataclasses.replace(
    LLAMA,
    architecture="HYV3ForCausalLM",
    names=LLAMA.names | NAMES,
    defaults=LLAMA.defaults
    | {
        "vocab_size": 120_832, "intermediate_size": 13_312, "num_hidden_layers": 80, "num_attention_heads": 64,
        "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5,
        "rope_theta": 11_158_840.0, "num_experts": 192, "num_experts_per_tok": 8, SHARED: 1,
        "moe_intermediate_size": 1536, "router_scaling_factor": 2.826, "bos_token_id": None, "eos_token_id": None,
    },
    ours=LLAMA.ours | {"qk_norm": "head"},
    read=_read,
    write=_write,
    also=(*LLAMA.also, TYPES),
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},
    silent=("output_router_logits", "enable_moe_fp32_combine"),  # sums of experts are in float32 here
    harmless=("num_nextn_predict_layers",),
    predicts_further=True,
    variants=lambda c: LLAMA.variants(c) | balanced_experts.find_variants(c) | {"expert_pattern": None},
)  # fmt: skip
