"""GLM-4.5 and what has its form: `Glm4MoeForCausalLM`, `Dots1ForCausalLM`, `SolarOpenForCausalLM`."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.balanced_experts import list_balanced, read_balanced, write_balanced
from shardformer.convert.families.expert_arrays import replace_dense
from shardformer.convert.families.hf_glm import GLM
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.hf_qwen3 import QWEN_3, list_head_norms
from shardformer.convert.families.hf_seed_oss import SEED_OSS, read_biased, write_biased
from shardformer.convert.families.layer_types import SLIDING
from shardformer.convert.families.layout import Stored
from shardformer.errors import UsageError

DENSE_FIRST = {"dense_first": "first_k_dense_replace"}


def _read(theirs: dict) -> dict[str, Any]:
    result = GLM.read(theirs) | read_balanced(theirs, balanced_experts.NAMES)
    return result | {"qk_norm": "head" if theirs["use_qk_norm"] else "none"}


def _write(c: Config) -> dict[str, Any]:
    return GLM.write(c) | write_balanced(c) | {"use_qk_norm": c.model.qk_norm == "head"}


def _layer(c: Config) -> list[Stored]:
    biases = list_qkv_biases(c) if c.model.bias == "qkv" else []
    norms = list_head_norms(c) if c.model.qk_norm == "head" else []
    return replace_dense(c, [*list_layer(c), *biases, *norms], list_balanced(c, "model.layers.{}.mlp"))


GLM_4_MOE = dataclasses.replace(
    GLM,
    architecture="Glm4MoeForCausalLM",
    names=GLM.names | balanced_experts.NAMES | DENSE_FIRST,
    defaults=GLM.defaults
    | {
        "intermediate_size": 10_944, "num_hidden_layers": 46, "num_attention_heads": 96, "num_key_value_heads": 8,
        "head_dim": None, "rms_norm_eps": 1e-5, "attention_bias": False, "moe_intermediate_size": 1408,
        "num_experts_per_tok": 8, "n_shared_experts": 1, "n_routed_experts": 128, "routed_scaling_factor": 1.0,
        "first_k_dense_replace": 1, "norm_topk_prob": True, "use_qk_norm": False, "eos_token_id": None,
        "pad_token_id": None,
    },
    fixed=balanced_experts.ONE_GROUP,
    read=_read,
    write=_write,
    layer=_layer,
    aliases={"num_local_experts": "n_routed_experts"},
    silent=(*balanced_experts.SILENT, "num_nextn_predict_layers", "num_mtp_layers"),
    predicts_further=True,
    variants=lambda c: GLM.variants(c) | balanced_experts.find_variants(c) | {"qk_norm": ("none", "head")},
)  # fmt: skip


def _read_solar(theirs: dict) -> dict[str, Any]:
    return read_biased(theirs) | read_balanced(theirs, balanced_experts.NAMES)


def _write_solar(c: Config) -> dict[str, Any]:
    return write_biased(c) | write_balanced(c)


def _layer_of_solar(c: Config) -> list[Stored]:
    return replace_dense(c, SEED_OSS.layer(c), list_balanced(c, "model.layers.{}.mlp"))


_DENSE = ("intermediate_size", "first_k_dense_replace", "use_qk_norm", "partial_rotary_factor")  # Solar Open lacks them
SOLAR_OPEN = dataclasses.replace(
    LLAMA,
    architecture="SolarOpenForCausalLM",
    names={ours: theirs for ours, theirs in LLAMA.names.items() if ours != "d_ff"} | balanced_experts.NAMES,
    defaults={key: value for key, value in GLM_4_MOE.defaults.items() if key not in _DENSE}
    | {
        "vocab_size": 196_608, "num_hidden_layers": 48, "num_attention_heads": 64, "head_dim": 128,
        "moe_intermediate_size": 1280, "rope_theta": 1e6,
    },
    fixed=balanced_experts.ONE_GROUP,
    read=_read_solar,
    write=_write_solar,
    layer=_layer_of_solar,
    aliases={"num_local_experts": "n_routed_experts"},
    silent=balanced_experts.SILENT,
    harmless=(),
    variants=lambda c: SEED_OSS.variants(c) | balanced_experts.find_variants(c) | {"dense_first": (0,)},
)  # fmt: skip


def _read_dots(theirs: dict) -> dict[str, Any]:
    first, layers = theirs["max_window_layers"], theirs["num_hidden_layers"]
    windowed = theirs["sliding_window"] is not None and (first is None or first < layers)
    if windowed if theirs.get("layer_types") is None else SLIDING in theirs["layer_types"]:
        raise UsageError(f"max_window_layers={first!r:.80} is not computed here; expected layers without a window")
    return LLAMA.read(theirs) | read_balanced(theirs, balanced_experts.NAMES)


def _write_dots(c: Config) -> dict[str, Any]:
    return LLAMA.write(c) | write_balanced(c) | {"sliding_window": None}


def _layer_of_dots(c: Config) -> list[Stored]:
    return replace_dense(c, QWEN_3.layer(c), list_balanced(c, "model.layers.{}.mlp"))


DOTS_1 = dataclasses.replace(
    LLAMA,
    architecture="Dots1ForCausalLM",
    names=LLAMA.names | balanced_experts.NAMES | DENSE_FIRST,
    defaults=LLAMA.defaults
    | {
        "vocab_size": 152_064, "hidden_size": 4608, "intermediate_size": 10_944, "num_hidden_layers": 62,
        "num_key_value_heads": 32, "moe_intermediate_size": 1408, "n_shared_experts": None, "n_routed_experts": None,
        "num_experts_per_tok": None, "first_k_dense_replace": 0, "norm_topk_prob": False, "routed_scaling_factor": 1.0,
        "sliding_window": 4096, "max_window_layers": 62, "bos_token_id": None, "eos_token_id": None,
    },
    fixed=balanced_experts.ONE_GROUP | {"attention_bias": (False,), "moe_layer_freq": (1,)},
    ours=LLAMA.ours | {"qk_norm": "head"},
    read=_read_dots,
    write=_write_dots,
    also=(*LLAMA.also, "layer_types"),
    layer=_layer_of_dots,
    aliases={"num_local_experts": "n_routed_experts"},
    silent=balanced_experts.SILENT,
    harmless=("scoring_func", "topk_method"),
    variants=lambda c: LLAMA.variants(c) | balanced_experts.find_variants(c),
)  # fmt: skip
