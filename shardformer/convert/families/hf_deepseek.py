"""DeepSeek V2 and V3, and Kimi K2, which has V3's form: `DeepseekV2ForCausalLM`, `DeepseekV3ForCausalLM`."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts, latent_arrays
from shardformer.convert.families.balanced_experts import check_groups, list_balanced, read_balanced, write_balanced
from shardformer.convert.families.expert_arrays import (
    QWEN_NAMES,
    check_experts,
    list_experts,
    list_shared,
    replace_dense,
)
from shardformer.convert.families.family import GATED_ACTIVATIONS, read_activation
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.latent_arrays import list_attention, read_latent, write_latent
from shardformer.convert.families.layout import Stored
from shardformer.errors import UsageError

_FLOAT: dict[str, tuple] = {"quantization_config": (None,)}  # FP8 is not read
_HARMLESS = ("aux_loss_alpha", "seq_aux", "ep_size")
_GREEDY, _IN_GROUPS = "greedy", "group_limited_greedy"
_NAMES = LLAMA.names | balanced_experts.NAMES | latent_arrays.NAMES | {"dense_first": "first_k_dense_replace"}


def read_dense(theirs: dict) -> dict[str, Any]:
    """Returns our keys of a model without experts."""
    return read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | read_latent(theirs)


def write_dense(c: Config) -> dict[str, Any]:
    return {"hidden_act": "silu"} | write_latent(c)


def _write(c: Config) -> dict[str, Any]:
    return write_dense(c) | write_balanced(c)


def list_dense(c: Config) -> list[Stored]:
    """Lists the norms, the attention and the dense feed-forward of a layer."""
    rest = [stored for stored in list_layer(c) if ".self_attn." not in stored.name]
    return [*rest, *list_attention(c)]


def _find_variants(c: Config) -> dict[str, tuple | None]:
    return LLAMA.variants(c) | balanced_experts.find_variants(c) | latent_arrays.find_variants(c)


def _read_v3(theirs: dict) -> dict[str, Any]:
    check_groups(theirs)
    return read_dense(theirs) | read_balanced(theirs, balanced_experts.NAMES)


DEEPSEEK_V3 = dataclasses.replace(
    LLAMA,
    architecture="DeepseekV3ForCausalLM",
    names=_NAMES | {"expert_groups": "n_group", "groups_per_token": "topk_group"},
    defaults={key: value for key, value in LLAMA.defaults.items() if key != "head_dim"}
    | {
        "vocab_size": 129_280, "hidden_size": 7168, "intermediate_size": 18_432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128,
        "moe_intermediate_size": 2048, "n_shared_experts": 1, "n_routed_experts": 256, "num_experts_per_tok": 8,
        "routed_scaling_factor": 2.5, "n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "norm_topk_prob": True,
        "bos_token_id": 0, "eos_token_id": 1,
    },
    fixed=_FLOAT
    | {
        "attention_bias": (False,), "rope_interleave": (True,), "moe_layer_freq": (1,), "scoring_func": ("sigmoid",),
        "topk_method": ("noaux_tc",),
    },
    read=_read_v3,
    write=_write,
    also=(*LLAMA.also, *latent_arrays.ALSO),
    layer=lambda c: replace_dense(c, list_dense(c), list_balanced(c, "model.layers.{}.mlp")),
    aliases={"num_local_experts": "n_routed_experts"},
    silent=(*LLAMA.silent, *balanced_experts.SILENT, "num_nextn_predict_layers", "num_mtp_layers"),
    harmless=_HARMLESS,
    predicts_further=True,
    variants=_find_variants,
)  # fmt: skip
KIMI_K2 = DEEPSEEK_V3


def _read_v2(theirs: dict) -> dict[str, Any]:
    width = "moe_intermediate_size"
    check_experts(theirs, "n_routed_experts", "num_experts_per_tok", width, "n_shared_experts")
    method, groups = theirs["topk_method"], {}
    if method == _IN_GROUPS:
        check_groups(theirs)
        groups = {"expert_groups": theirs["n_group"], "groups_per_token": theirs["topk_group"]}
    elif method != _GREEDY:
        raise UsageError(f"topk_method={method!r:.80} is not computed here; expected {_GREEDY!r} or {_IN_GROUPS!r}")
    return read_dense(theirs) | groups | {"shared_width": theirs["n_shared_experts"] * theirs[width]}


def _write_v2(c: Config) -> dict[str, Any]:
    groups = {"n_group": c.experts.expert_groups, "topk_group": c.experts.groups_per_token}
    return _write(c) | groups | {"topk_method": _IN_GROUPS if c.experts.expert_groups > 1 else _GREEDY}


def _layer_v2(c: Config) -> list[Stored]:
    at = "model.layers.{}.mlp"
    experts = [*list_experts(c, at, QWEN_NAMES), *list_shared(c, f"{at}.shared_experts")]
    return replace_dense(c, list_dense(c), experts)


def _find_variants_v2(c: Config) -> dict[str, tuple | None]:
    chosen = {"router": ("softmax",), "balance_rate": (0.0,), "expert_groups": None, "groups_per_token": None}
    return _find_variants(c) | chosen | {"experts": (c.experts.experts or "some",)}


DEEPSEEK_V2 = dataclasses.replace(
    DEEPSEEK_V3,
    architecture="DeepseekV2ForCausalLM",
    names={ours: theirs for ours, theirs in _NAMES.items() if ours != "router_norm"},
    defaults=DEEPSEEK_V3.defaults
    | {
        "vocab_size": 102_400, "hidden_size": 4096, "intermediate_size": 11_008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": None, "max_position_embeddings": 2048,
        "moe_intermediate_size": 1407, "n_shared_experts": 2, "n_routed_experts": 64, "num_experts_per_tok": None,
        "routed_scaling_factor": 1.0, "n_group": None, "topk_group": None, "topk_method": _GREEDY,
        "first_k_dense_replace": 0, "norm_topk_prob": False, "bos_token_id": 1, "eos_token_id": 2,
    },
    fixed=_FLOAT
    | {
        "attention_bias": (False,), "mlp_bias": (False,), "norm_topk_prob": (False,), "moe_layer_freq": (1,),
        "scoring_func": ("softmax",),
    },
    ours=LLAMA.ours | {"router_norm": False},
    read=_read_v2,
    write=_write_v2,
    layer=_layer_v2,
    aliases={"num_experts": "n_routed_experts"},
    silent=(*LLAMA.silent, *balanced_experts.SILENT),
    predicts_further=False,
    variants=_find_variants_v2,
)  # fmt: skip
