"""Llama 4's model of text: `Llama4ForCausalLM`. Attention within chunks, and experts whose inputs are weighted."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import expert_arrays
from shardformer.convert.families.expert_arrays import check_experts, list_joined_by_inputs, list_shared, replace_dense
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.hf_smollm3 import read_letters
from shardformer.convert.families.layer_types import FULL, list_types, read_window, to_keys
from shardformer.convert.families.layout import Stored, linear, neighbours, rename
from shardformer.errors import UsageError

CHUNKED, CHUNK = "chunked_attention", "attention_chunk_size"
KINDS = {("f", CHUNKED): "w", ("f", FULL): "f", ("n", FULL): "n"}  # our letter, by rotation and their type
GROWTH, TOKENS, GROWS = "attn_scale", "floor_scale", "attn_temperature_tuning"
SPARSE, STEP = "moe_layers", "interleave_moe_layer_step"


def _read(theirs: dict) -> dict[str, Any]:
    check_experts(theirs, "num_local_experts", "intermediate_size", STEP)
    layers = _read_layers(theirs)
    return LLAMA.read(theirs) | layers | _read_growth(theirs, layers["window_pattern"]) | {
        "shared_width": theirs["intermediate_size"],
        "qk_norm": "rotated_plain" if theirs["use_qk_norm"] else "none",
    }  # fmt: skip


def _read_growth(theirs: dict, pattern: str) -> dict[str, Any]:
    """Returns our keys for the growth of queries, which only layers without rotary positions have."""
    if not (theirs[GROWS] and theirs[GROWTH] and "n" in pattern):
        return {"query_growth": 0.0, "query_growth_tokens": None}
    tokens = theirs[TOKENS]
    whole = int(tokens) if isinstance(tokens, float) and tokens.is_integer() else tokens
    check_experts({TOKENS: whole}, TOKENS)
    return {"query_growth": float(theirs[GROWTH]), "query_growth_tokens": whole}


def _read_layers(theirs: dict) -> dict[str, Any]:
    """Returns our keys for layers with chunks, without rotary positions, and with experts."""
    rotating = read_letters(theirs | {"no_rope_layers": theirs["no_rope_layers"] or None})
    default = [CHUNKED if letter == "f" and theirs[CHUNK] is not None else FULL for letter in rotating]
    types, layers = theirs["layer_types"] or default, len(rotating)
    is_list = isinstance(types, list) and len(types) == layers
    if not is_list or not all(kind in KINDS for kind in zip(rotating, types, strict=True)):
        raise UsageError(
            f"layer_types={types!r:.80} is not computed here; expected {layers} names, each {CHUNKED} or {FULL}, and "
            f"{FULL} for layers without rotary positions"
        )
    letters = "".join(KINDS[kind] for kind in zip(rotating, types, strict=True))
    windows = to_keys(letters, read_window(theirs, CHUNK) if "w" in letters else 0)
    sparse = list(range(theirs[STEP] - 1, layers, theirs[STEP])) if theirs[SPARSE] is None else theirs[SPARSE]
    if not isinstance(sparse, list) or not all(type(number) is int and 0 <= number < layers for number in sparse):
        raise UsageError(f"{SPARSE}={sparse!r:.80} is not computed here; expected a list of layers below {layers}")
    experts = expert_arrays.to_keys("".join("e" if i in sparse else "d" for i in range(layers)), SPARSE)
    return windows | experts | {"window_chunks": "w" in letters}


def _write(c: Config) -> dict[str, Any]:
    return LLAMA.write(c) | {
        "layer_types": list_types(c, CHUNKED, FULL),
        CHUNK: c.model.window,
        "no_rope_layers": [int(not still) for still in c.model.layers_without_rotary],
        SPARSE: [i for i, is_sparse in enumerate(c.mixture.sparse_layers) if is_sparse],
        "use_qk_norm": c.model.qk_norm == "rotated_plain",
        GROWS: bool(c.model.query_growth),
        GROWTH: c.model.query_growth,
        TOKENS: c.model.query_growth_tokens or c.model.seq,
    }


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.feed_forward"
    experts = [
        linear(f"{at}.router", "router", c.experts.experts, c.model.d_model),
        *list_joined_by_inputs(c, f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"),
        *list_shared(c, f"{at}.shared_expert"),
    ]
    return replace_dense(c, rename(list_layer(c, neighbours), {r"\.mlp\.": ".feed_forward."}), experts)


def _find_variants(c: Config) -> dict[str, tuple | None]:
    any_value = ("window", "window_pattern", "query_growth_tokens", "dense_first", "expert_pattern")
    return LLAMA.variants(c) | dict.fromkeys(any_value) | {
        "window_chunks": (bool(c.model.window),),
        "qk_norm": ("none", "rotated_plain"),
        "query_growth": None if c.model.query_growth_tokens else (0.0,),
        "shared_width": (c.mixture.expert_size,),
    }  # fmt: skip


LLAMA_4 = dataclasses.replace(
    LLAMA,
    architecture="Llama4ForCausalLM",
    names=LLAMA.names
    | {
        "d_ff": "intermediate_size_mlp", "expert_width": "intermediate_size", "experts": "num_local_experts",
        "experts_per_token": "num_experts_per_tok",
    },
    defaults=LLAMA.defaults
    | {
        "vocab_size": 202_048, "hidden_size": 5120, "intermediate_size": 8192, "intermediate_size_mlp": 16_384,
        "num_hidden_layers": 48, "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128,
        "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "num_local_experts": 16,
        "num_experts_per_tok": 1, SPARSE: None, STEP: 1, "use_qk_norm": True, "no_rope_layers": None,
        "no_rope_layer_interval": 4, "layer_types": None, CHUNK: 8192, GROWS: True, GROWTH: 0.1, TOKENS: 8192,
    },
    fixed={"attention_bias": (False,)},
    ours=LLAMA.ours | {"router": "sigmoid", "router_norm": False, "gate_inputs": True},
    read=_read,
    write=_write,
    layer=_layer,
    silent=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
    harmless=("cache_implementation", "for_llm_compressor"),
    variants=_find_variants,
)  # fmt: skip
