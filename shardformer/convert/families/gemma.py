"""The common part of Gemma 2 and Gemma 3: norms around both branches, scaled embeddings, windows in some layers."""

from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import ACTIVATIONS, GATED_ACTIVATIONS, read_activation
from shardformer.convert.families.hf_llama import list_projections, read_head_size
from shardformer.convert.families.layer_types import FULL, SLIDING, find_window_variants, list_types
from shardformer.convert.families.layout import Stored, norm
from shardformer.errors import UsageError

DEFAULTS = {
    "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 256, "hidden_activation": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True, "query_pre_attn_scalar": 256, "sliding_window": 4096, "final_logit_softcapping": None,
    "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
FIXED: dict[str, tuple] = {"attention_bias": (False,), "use_bidirectional_attention": (False, None)}
OURS = {
    "norm": "rmsnorm_plus_one", "embed_scale": None,
    "block": "sequential_four_norms", "bias": "none", "positions": "rotary",
}  # fmt: skip
ALSO = (
    "num_key_value_heads", "head_dim", "hidden_activation", "query_pre_attn_scalar", "sliding_window", "layer_types",
    "final_logit_softcapping",
)  # fmt: skip
# Keys that transformers does not read: Gemma's activation is hidden_activation.
HARMLESS = ("hidden_act", "sliding_window_size", "cache_implementation")
_TANH = {name: "geglu" for name, ours in ACTIVATIONS.items() if ours == "gelu"}
TO_ACTIVATIONS = {"geglu": "gelu_pytorch_tanh", "swiglu": "silu"}


def read_settings(theirs: dict) -> dict:
    """Returns our keys, except those of windows and of rotary positions."""
    scalar = theirs["query_pre_attn_scalar"]
    if type(scalar) is not int or scalar < 1:
        raise UsageError(f"query_pre_attn_scalar={scalar!r:.80} is not computed here; expected a whole number above 0")
    result = read_activation(theirs, "hidden_activation", _TANH | GATED_ACTIVATIONS) | read_head_size(theirs)
    return result | {
        "kv_heads": theirs["num_key_value_heads"],
        "attention_scale": None if scalar == theirs["head_dim"] else scalar**-0.5,
        "logits_cap": read_cap(theirs, "final_logit_softcapping"),
    }


def read_cap(theirs: dict, key: str) -> float | None:
    """Returns the bound of some logits; null is None."""
    cap = theirs[key]
    if cap is not None and not (type(cap) in (int, float) and cap > 0):
        raise UsageError(f"{key}={cap!r:.80} cannot bound logits; expected a number above 0, or null")
    return None if cap is None else float(cap)


def write_settings(c: Config) -> dict[str, Any]:
    return {
        "head_dim": c.model.head_size,
        "num_key_value_heads": c.model.key_value_heads,
        "hidden_activation": TO_ACTIVATIONS[c.model.activation],
        "query_pre_attn_scalar": _to_scalar(c),
        "sliding_window": c.model.window
        or c.model.seq,  # without a number, transformers fails even if all layers are full
        "layer_types": list_types(c, SLIDING, FULL),
        "final_logit_softcapping": c.model.logits_cap,
    }


def _to_scalar(c: Config) -> int:
    return max(round(c.model.attention_scale**-2), 1) if c.model.attention_scale else c.model.head_size


def find_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values that both families compute."""
    result: dict[str, tuple | None] = {
        "activation": tuple(TO_ACTIVATIONS),
        "attention_scale": (None, _to_scalar(c) ** -0.5),  # that of a whole query_pre_attn_scalar
        "rotary_dims": (None, c.model.head_size),
    }
    free = ("head_dim", "kv_heads", "logits_cap", "rotary_scaling", "rotary_theta")
    return result | dict.fromkeys(free) | find_window_variants(c)


def list_layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "post_attention_norm", c),
        *norm(f"{at}.pre_feedforward_layernorm", "feed_forward_norm", c),
        *norm(f"{at}.post_feedforward_layernorm", "post_feed_forward_norm", c),
        *list_projections(c),
    ]
