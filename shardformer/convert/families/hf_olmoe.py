"""OLMoE: `OlmoeForCausalLM`. Llama with experts, and one norm over the queries (or keys) of all heads."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import QWEN_NAMES, check_experts, list_experts, replace_dense
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.hf_olmo2 import OLMO_2, list_qk_norms
from shardformer.convert.families.layout import Stored
from shardformer.errors import UsageError


def _layer(c: Config) -> list[Stored]:
    layer = [*list_layer(c), *list_qk_norms(c)]
    return replace_dense(c, layer, list_experts(c, "model.layers.{}.mlp", QWEN_NAMES))


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_experts")
    ours = OLMO_2.read(theirs)
    if ours["head_dim"]:
        raise UsageError(
            f"head_dim={theirs['head_dim']!r:.80} is not computed by this family; expected hidden_size / "
            "num_attention_heads"
        )
    return ours


def _list_variants(c: Config) -> dict[str, Any]:
    return {key: values for key, values in LLAMA.variants(c).items() if key != "head_dim"}


OLMOE = dataclasses.replace(
    OLMO_2,
    architecture="OlmoeForCausalLM",
    names=OLMO_2.names
    | {"experts": "num_experts", "experts_per_token": "num_experts_per_tok", "router_norm": "norm_topk_prob"},
    defaults=OLMO_2.defaults
    | {
        "hidden_size": 2048, "intermediate_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 16,
        "max_position_embeddings": 4096, "num_experts": 64, "num_experts_per_tok": 8, "norm_topk_prob": False,
    },
    fixed=OLMO_2.fixed | {"clip_qkv": (None,)},
    ours=OLMO_2.ours | {"block": "sequential"},
    read=_read,
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},
    silent=(*OLMO_2.silent, "output_router_logits", "router_aux_loss_coef"),
    variants=_list_variants,
)  # fmt: skip
