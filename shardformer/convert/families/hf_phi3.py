"""Phi-3, Phi-3.5, Phi-4 and Phi-4-mini: `Phi3ForCausalLM`. Llama with q, k and v joined, and gate and up."""

import functools

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.family import (
    GATED_ACTIVATIONS,
    ROPE_KEYS,
    Family,
    read_activation,
    read_partial_rotary,
    share_rotating,
    write_rope,
)
from shardformer.convert.families.hf_llama import LLAMA, read_head_size
from shardformer.convert.families.layer_types import check_layers, read_window
from shardformer.convert.families.layout import Part, Stored, View, half_split, linear, norm
from shardformer.errors import UsageError

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 32_064, "hidden_size": 3072, "intermediate_size": 8192, "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5, "partial_rotary_factor": 1.0, "sliding_window": None, "bos_token_id": 1,
    "eos_token_id": 32_000, "pad_token_id": 32_000, "original_max_position_embeddings": 4096,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    theirs = theirs | {"rope_scaling": _find_rope(theirs)}
    result = read_activation(theirs, "hidden_act", GATED_ACTIVATIONS) | read_head_size(theirs)
    result |= {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    if theirs["sliding_window"] is not None:
        check_layers(theirs)
        result |= {"window": read_window(theirs)}
    return result | read_partial_rotary(theirs)


def _find_rope(theirs: dict) -> dict:
    """Returns the rotary settings as transformers reads them: the first files name longrope "su" or "yarn"."""
    rope = dict(theirs.get("rope_scaling") or theirs.get("rope_parameters") or {})
    kind = rope.pop("rope_type", rope.pop("type", "default"))
    kind = "longrope" if kind in ("su", "yarn") else kind
    if kind not in ("default", "longrope"):
        raise UsageError(f"rope_type={kind!r:.80} is not computed for Phi-3; expected 'default' or 'longrope'")
    rope.pop("type", None)
    old_seq = {"original_max_position_embeddings": theirs["original_max_position_embeddings"]}
    return rope | {"rope_type": kind} | (old_seq if kind == "longrope" else {})


def _write(c: Config) -> dict:
    share = share_rotating(c)
    return {
        "rope_theta": c.model.rotary_theta,  # libraries of before `rope_parameters` read it
        "partial_rotary_factor": share,
        "rope_parameters": write_rope(c) | {"partial_rotary_factor": share},
        "num_key_value_heads": c.model.key_value_heads,
        "head_dim": c.model.head_size,
        "hidden_act": "silu",
        "sliding_window": c.model.window,
        "original_max_position_embeddings": c.model.longest_short_row or c.model.seq,
    }


def _layer(c: Config) -> list[Stored]:
    D, F, G, K, at = c.model.d_model, c.model.ff_size, c.model.key_value_heads, c.model.head_size, "model.layers.{}"
    shared = c.model.heads // G  # query heads of a key/value head: the rows are seen as blocks of G heads
    queries = [
        Part(part.ours, functools.partial(_show_heads, part.view, i * G, G), (i, *part.cut))
        for i in range(shared)
        for part in half_split("q", c, c.model.heads)
    ]
    keys = [part._replace(cut=(shared, *part.cut)) for part in half_split("k", c, G)]
    values = [part._replace(cut=(shared + 1, *part.cut)) for part in half_split("v", c.replace(positions="none"), G)]
    gate_and_up = tuple(Part(name, np.transpose, (i,)) for i, name in enumerate(("gate", "up")))
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        Stored(
            f"{at}.self_attn.qkv_proj.weight",
            ((shared + 2) * G * K, D),
            (*queries, *keys, *values),
            seen=(shared + 2, G, K, D),
        ),
        linear(f"{at}.self_attn.o_proj", "o", D, c.model.attention_size),
        Stored(f"{at}.mlp.gate_up_proj.weight", (2 * F, D), gate_and_up, seen=(2, F, D)),
        linear(f"{at}.mlp.down_proj", "down", D, F),
    ]


def _show_heads(view: View, first: int, count: int, ours: np.ndarray) -> np.ndarray:
    return view(ours)[first : first + count]


def _find_variants(c: Config) -> dict[str, tuple | None]:
    scaling = {} if c.model.longest_short_row else {"rotary_scaling": ("",)}
    return LLAMA.variants(c) | {"rotary_dims": None, "window": None} | scaling


PHI_3 = Family(
    architecture="Phi3ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed={
        "attention_bias": (False,), "full_attn_mod": (1,), "interpolate_factor": (1,), "lm_head_bias": (False,),
        "mlp_bias": (False,),
    },
    ours=LLAMA.ours,
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", "head_dim", "sliding_window", *ROPE_KEYS),
    outside=LLAMA.outside,
    layer=_layer,
    dropouts=("attention_dropout", "embd_pdrop", "resid_pdrop"),
    variants=_find_variants,
)  # fmt: skip
