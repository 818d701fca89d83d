"""MiniMax-M2: `MiniMaxM2ForCausalLM`. Mixtral's experts with sigmoids and a bias, norms over all queries and keys."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.expert_arrays import check_experts, list_experts, replace_dense
from shardformer.convert.families.family import (
    GATED_ACTIVATIONS,
    read_activation,
    read_partial_rotary,
    share_rotating,
    write_rope,
)
from shardformer.convert.families.hf_llama import LLAMA, list_layer, read_head_size, write_settings
from shardformer.convert.families.hf_mixtral import MIXTRAL, NAMES
from shardformer.convert.families.hf_olmo2 import list_qk_norms
from shardformer.convert.families.layout import Stored, plain


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "num_local_experts")
    if theirs.get("rotary_dim") is not None:  # transformers makes it the share of a head that rotates
        share = {"partial_rotary_factor": theirs["rotary_dim"] / theirs["head_dim"]}
        theirs = theirs | share
    heads = {"kv_heads": theirs["num_key_value_heads"], "router": "sigmoid", "balance_rate": balanced_experts.RATE}
    result = read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | read_head_size(theirs) | heads
    return result | read_partial_rotary(theirs)


def _write(c: Config) -> dict[str, Any]:
    rope = write_rope(c) | {"partial_rotary_factor": share_rotating(c)}
    return write_settings(c) | {"rotary_dim": c.model.rotary_size, "rope_parameters": rope}


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.block_sparse_moe"
    biases = plain(f"{at}.e_score_correction_bias", "router_bias", c.experts.experts)
    return replace_dense(c, [*list_layer(c), *list_qk_norms(c)], [*list_experts(c, at, NAMES), biases])


MINIMAX_M2 = dataclasses.replace(
    LLAMA,
    architecture="MiniMaxM2ForCausalLM",
    names=MIXTRAL.names,
    defaults=LLAMA.defaults
    | {
        "vocab_size": 200_064, "hidden_size": 3072, "intermediate_size": 1536, "num_hidden_layers": 62,
        "num_attention_heads": 48, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196_608,
        "rope_theta": 5e6, "partial_rotary_factor": 1.0, "num_experts_per_tok": 8, "num_local_experts": 256,
        "bos_token_id": 200_034, "eos_token_id": 200_020,
    },
    fixed={"attention_bias": (False,), "use_qk_norm": (True,), "use_routing_bias": (True,), "use_mtp": (False,)},
    ours=LLAMA.ours | {"qk_norm": "all"},
    read=_read,
    write=_write,
    also=(*LLAMA.also, "rotary_dim"),
    layer=_layer,
    aliases={"num_experts": "num_local_experts"},
    silent=(*balanced_experts.SILENT, "router_jitter_noise"),
    harmless=(),
    variants=lambda c: LLAMA.variants(c)
    | {"rotary_dims": None, "router": ("sigmoid",), "balance_rate": (c.experts.balance_rate or balanced_experts.RATE,)},
)  # fmt: skip
