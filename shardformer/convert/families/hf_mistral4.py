"""Mistral 4: `Mistral4ForCausalLM`. DeepSeek-V3's attention, Ministral 3's growth of queries, softmax routers."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.expert_arrays import check_experts, list_joined, list_shared, replace_dense
from shardformer.convert.families.hf_deepseek import DEEPSEEK_V2, DEEPSEEK_V3, list_dense, read_dense
from shardformer.convert.families.hf_ministral3 import (
    GROWTH,
    ROPE,
    ROPE_NAMES,
    add_growth,
    find_growing_variants,
    read_growing,
)
from shardformer.convert.families.latent_arrays import OF_YARN
from shardformer.convert.families.layout import Stored, linear
from shardformer.errors import UsageError

# The scaling of a config.json that names none.
_ROPE = ROPE | {"rope_theta": 1e4, "factor": 128.0, "original_max_position_embeddings": 8192}
_SHARE = "partial_rotary_factor"
_NOT_OF_LATENTS = {GROWTH, _SHARE, *ROPE_NAMES} - {*OF_YARN}


def _read(theirs: dict) -> dict[str, Any]:
    width = "moe_intermediate_size"
    check_experts(theirs, "n_routed_experts", "num_experts_per_tok", width, "n_shared_experts")
    rope, growth = read_growing(theirs, _ROPE)
    rotary, size = theirs["qk_rope_head_dim"], theirs["qk_rope_head_dim"] + theirs["qk_nope_head_dim"]
    for key, found, expected in ((_SHARE, rope.get(_SHARE), rotary / size), ("head_dim", theirs.get("head_dim"), size)):
        if found not in (None, expected):
            raise UsageError(f"{key}={found!r:.80} is not computed here; expected {expected}")
    rope = {name: value for name, value in rope.items() if name not in _NOT_OF_LATENTS}
    # The latents' reader expects DeepSeek's head_dim, and takes no share.
    others = {key: value for key, value in theirs.items() if key not in ("rope_scaling", "head_dim", _SHARE)}
    result = read_dense(others | {"rope_parameters": rope})
    return result | growth | {"router": "softmax", "shared_width": theirs["n_shared_experts"] * theirs[width]}


def _write(c: Config) -> dict[str, Any]:
    share = {_SHARE: c.model.rotary_size / c.model.head_size}
    written = DEEPSEEK_V3.write(c)
    objects = {key: written[key] | share for key in ("rope_parameters", "rope_scaling")}
    return add_growth(c, written | objects)


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.mlp"
    experts = [
        linear(f"{at}.gate", "router", c.experts.experts, c.model.d_model),
        *list_joined(c, f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"),
        *list_shared(c, f"{at}.shared_experts"),
    ]
    return replace_dense(c, list_dense(c), experts)


def _find_variants(c: Config) -> dict[str, tuple | None]:
    chosen = DEEPSEEK_V2.variants(c) | {"expert_groups": (1,), "groups_per_token": (1,)}
    return chosen | find_growing_variants(c)


MISTRAL_4 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="Mistral4ForCausalLM",
    names={ours: theirs for ours, theirs in DEEPSEEK_V3.names.items() if theirs not in balanced_experts.ONE_GROUP},
    defaults=DEEPSEEK_V3.defaults
    | {
        "vocab_size": 131_072, "hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 1_048_576,
        "kv_lora_rank": 256, "q_lora_rank": 1024, "qk_nope_head_dim": 64, "n_routed_experts": 128,
        "num_experts_per_tok": 4, "routed_scaling_factor": 1.0, "n_group": 1, "topk_group": 1,
        "first_k_dense_replace": 0, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 11,
    },
    fixed=balanced_experts.ONE_GROUP
    | {"quantization_config": (None,), "attention_bias": (False,), "rope_interleave": (True,)},
    read=_read,
    write=_write,
    layer=_layer,
    predicts_further=False,
    variants=_find_variants,
)  # fmt: skip
