"""gpt-oss: `GptOssForCausalLM`. Sinks in attention, biases, and experts with interleaved gates, stored in MXFP4."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts, replace_dense
from shardformer.convert.families.hf_llama import LLAMA, list_layer, read_head_size, read_rotary, write_rotary
from shardformer.convert.families.hf_mixtral import MIXTRAL
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.layer_types import (
    FULL,
    SLIDING,
    find_window_variants,
    list_types,
    read_layer_types,
    read_window,
    to_keys,
)
from shardformer.convert.families.layout import Part, Stored, linear, plain
from shardformer.errors import UsageError

# The scaling of a config.json that names none.
ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "num_local_experts")
    quantization = theirs.get("quantization_config") or {"quant_method": "mxfp4"}
    if quantization.get("quant_method") != "mxfp4":
        raise UsageError(f"quantization_config={quantization!r:.80} is not read here; expected quant_method='mxfp4'")
    if not (theirs.get("rope_scaling") or theirs.get("rope_parameters")):
        theirs = theirs | {"rope_scaling": ROPE}
    letters = read_layer_types(theirs, "wf")
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    windows = to_keys(letters, read_window(theirs) if "w" in letters else 0)
    bias = {"bias": "attention" if theirs["attention_bias"] else "none"}
    return heads | read_head_size(theirs) | read_rotary(theirs) | windows | bias


def _write(c: Config) -> dict[str, Any]:
    return write_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "head_dim": c.model.head_size,
        "sliding_window": c.model.window or c.model.seq,
        "layer_types": list_types(c, SLIDING, FULL),
        "attention_bias": c.model.bias == "attention",
    }


def _layer(c: Config) -> list[Stored]:
    D, F, E, at = c.model.d_model, c.mixture.expert_size, c.experts.experts, "model.layers.{}"
    biases = [*list_qkv_biases(c), plain(f"{at}.self_attn.o_proj.bias", "o_bias", D)]
    experts = [
        linear(f"{at}.mlp.router", "router", E, D),
        plain(f"{at}.mlp.router.bias", "router_shift", E),
        Stored(f"{at}.mlp.experts.gate_up_proj", (E, D, 2 * F), _list_interleaved("", (slice(None), slice(None)))),
        Stored(f"{at}.mlp.experts.gate_up_proj_bias", (E, 2 * F), _list_interleaved("_bias", (slice(None),))),
        plain(f"{at}.mlp.experts.down_proj", "expert_down", E, F, D),
        plain(f"{at}.mlp.experts.down_proj_bias", "expert_down_bias", E, D),
    ]
    sinks = plain(f"{at}.self_attn.sinks", "sinks", c.model.heads)
    return replace_dense(c, [*list_layer(c), *(biases if c.model.bias != "none" else []), sinks], experts)


def _list_interleaved(suffix: str, before: tuple[slice, ...]) -> tuple[Part, ...]:
    """Lists the parts of an array whose last axis has the outputs of gate and up in turn."""
    places = {"gate": slice(0, None, 2), "up": slice(1, None, 2)}
    return tuple(Part(f"expert_{name}{suffix}", cut=(*before, place)) for name, place in places.items())


def _find_variants(c: Config) -> dict[str, tuple | None]:
    kinds = {"activation": ("clamped_swiglu",), "bias": ("attention", "none")}
    return LLAMA.variants(c) | kinds | find_window_variants(c)


GPT_OSS = dataclasses.replace(
    LLAMA,
    architecture="GptOssForCausalLM",
    names=MIXTRAL.names,
    defaults=LLAMA.defaults
    | {
        "vocab_size": 201_088, "hidden_size": 2880, "intermediate_size": 2880, "num_hidden_layers": 36,
        "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 64, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 150_000.0, "num_local_experts": 128, "num_experts_per_tok": 4,
        "sliding_window": 128, "attention_bias": True, "bos_token_id": None, "eos_token_id": None,
    },
    fixed={"swiglu_alpha": (1.702,), "swiglu_limit": (7.0,)},
    ours=LLAMA.ours | {"activation": "clamped_swiglu", "sinks": True, "expert_bias": True},
    read=_read,
    write=_write,
    also=(*LLAMA.also, "layer_types", "quantization_config"),
    layer=_layer,
    aliases={"num_experts": "num_local_experts"},
    silent=("output_router_logits", "router_aux_loss_coef"),
    harmless=("hidden_act", "experts_per_token", "initial_context_length"),
    variants=_find_variants,
)  # fmt: skip
