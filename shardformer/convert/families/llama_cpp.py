"""What llama.cpp computes, and how its format names the arrays of our models. One entry of GGUF a family."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.layout import Pairs, Part, Stored, half_split, neighbours
from shardformer.kernels.rotary import find_frequencies

# Our arrays outside the layers, and those of a layer -> the names of GGUF; {} stands for the layer's number.
OUTSIDE = {
    "embed/tokens": "token_embd.weight", "embed/positions": "position_embd.weight",
    "head/norm/scale": "output_norm.weight", "head/norm/offset": "output_norm.bias",
    "head/w": "output.weight", "head/bias": "output.bias",
}  # fmt: skip
_NORMS = {
    "norm": "attn_norm", "attention_norm": "attn_norm", "feed_forward_norm": "ffn_norm",
    "post_attention_norm": "post_attention_norm", "post_feed_forward_norm": "post_ffw_norm",
}  # fmt: skip
_MATRICES = {
    "q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output",
    "up": "ffn_up", "gate": "ffn_gate", "down": "ffn_down",
}  # fmt: skip
IN_LAYER = {
    **{f"{ours}/scale": f"blk.{{}}.{theirs}.weight" for ours, theirs in _NORMS.items()},
    **{f"{ours}/offset": f"blk.{{}}.{theirs}.bias" for ours, theirs in _NORMS.items()},
    **{ours: f"blk.{{}}.{theirs}.weight" for ours, theirs in _MATRICES.items()},
    **{f"{ours}_bias": f"blk.{{}}.{theirs}.bias" for ours, theirs in _MATRICES.items()},
    **{f"{ours}_{kind}": f"blk.{{}}.attn_{ours}_norm.weight" for ours in "qk" for kind in ("scale", "head_scale")},
    **{f"expert_{ours}": f"blk.{{}}.ffn_{ours}_exps.weight" for ours in ("gate", "up", "down")},
    "router": "blk.{}.ffn_gate_inp.weight",
}
QKV: dict[str, tuple[str, ...]] = {"attn_qkv": ("q", "k", "v")}


@dataclasses.dataclass(frozen=True)
class Gguf:
    """A family in llama.cpp: its architecture, and the values of our keys that llama.cpp computes for it."""

    architecture: str
    pairs: Pairs = half_split  # the rotary pairs of its queries and keys
    joined: dict[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)  # one array -> ours, in order
    zeros: tuple[str, ...] = ()  # biases that it needs, and that the family lacks
    writes_head: bool = False  # the table is written again as the head of a tied model
    scalings: tuple[str, ...] = ("linear",)  # kinds of rotary scaling
    settings: Callable[[Config], dict[str, Any]] = lambda config: {}  # its keys besides those of every model
    # Our key -> the values that it computes, where these are fewer than the family's.
    computes: Callable[[Config], dict[str, tuple]] = lambda config: {}


def list_settings(gguf: Gguf, c: Config) -> dict[str, Any]:
    """Returns the keys of a model, without the name of the architecture before each."""
    epsilon = "attention.layer_norm_rms_epsilon" if c.model.norm.startswith("rms") else "attention.layer_norm_epsilon"
    settings: dict[str, Any] = {
        "context_length": c.model.seq,
        "embedding_length": c.model.d_model,
        "block_count": c.model.layers,
        "feed_forward_length": c.mixture.expert_size if c.experts.experts else c.model.ff_size,
        "attention.head_count": c.model.heads,
        "attention.head_count_kv": c.model.key_value_heads,
        "attention.key_length": c.model.head_size,
        "attention.value_length": c.model.head_size,
        epsilon: float(c.model.norm_eps),
        "vocab_size": c.model.vocab,
    }
    if c.model.positions == "rotary":
        settings |= {"rope.dimension_count": c.model.rotary_size, "rope.freq_base": float(c.model.rotary_theta)}
        scaling = c.model.parsed_scaling
        if scaling and scaling.kind == "linear":
            settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": float(scaling.factor)}
    if c.experts.experts:
        settings |= {"expert_count": c.experts.experts, "expert_used_count": c.experts.experts_per_token}
    return settings | gguf.settings(c)


def list_differences(gguf: Gguf, c: Config) -> list[str]:
    """Lists those of our keys that have values which llama.cpp does not compute for the family."""
    result = [f"{key}={c.shown(key)}" for key, values in gguf.computes(c).items() if c.get(key) not in values]
    scaling = c.model.parsed_scaling
    if c.model.positions == "rotary" and scaling and scaling.kind not in gguf.scalings:
        result.append(f"rotary_scaling={c.shown('rotary_scaling')}")
    return result


def find_frequency_factors(c: Config) -> np.ndarray | None:
    """Returns the factors by which llama3's scaling divides the frequencies; None for another scaling."""
    scaling = c.model.parsed_scaling
    if not scaling or scaling.kind != "llama3":
        return None
    plain, scaled = (find_frequencies(c.model.rotary_size, c.model.rotary_theta, kind) for kind in (None, scaling))
    return plain / scaled


def store(gguf: Gguf, c: Config, ours: str, name: str) -> Stored:
    """Returns how GGUF stores the array `ours` of a layer, or outside of them: matrices are [outputs, inputs]."""
    D, H, G, K, V = c.model.d_model, c.model.heads, c.model.key_value_heads, c.model.head_size, c.model.vocab
    heads = {"q": H, "k": G}.get(ours[0], 1) if ours[1:] in ("", "_bias", "_scale", "_head_scale") else 0
    match ours:
        case "embed/tokens":
            return Stored(name, (V, D), (Part(ours, lambda table: table[:V]),))
        case "head/w":
            return Stored(name, (V, D), (Part(ours, lambda head: head[:, :V].T),))
        case "head/bias":
            return Stored(name, (V,), (Part(ours, lambda bias: bias[:V]),))
        case "q" | "k":
            return Stored(name, (heads * K, D), gguf.pairs(ours, c, heads), seen=(heads, K, D))
        case "q_bias" | "k_bias" | "q_scale" | "k_scale":
            return Stored(name, (heads * K,), gguf.pairs(ours, c, heads), seen=(heads, K))
        case "q_head_scale" | "k_head_scale":
            return Stored(name, (K,), gguf.pairs(ours, c, 1), seen=(1, K))
    return Stored(name, (), (Part(ours, _turn if ours != "embed/positions" else _keep),))


def _keep(ours: np.ndarray) -> np.ndarray:
    return ours


def _turn(ours: np.ndarray) -> np.ndarray:
    """Exchanges inputs and outputs of a matrix, or of the matrices of experts."""
    return ours.swapaxes(-1, -2) if ours.ndim > 1 else ours


def _neox_settings(c: Config) -> dict[str, Any]:
    return {"use_parallel_residual": c.model.block == "parallel_two_norms"}


def _gemma2_settings(c: Config) -> dict[str, Any]:
    caps = {"attn_logit_softcapping": c.model.attention_cap, "final_logit_softcapping": c.model.logits_cap}
    return {"attention.sliding_window": c.model.window or c.model.seq, **{k: float(v) for k, v in caps.items() if v}}


def _gemma3_settings(c: Config) -> dict[str, Any]:
    cap = {"final_logit_softcapping": float(c.model.logits_cap)} if c.model.logits_cap else {}
    return {"attention.sliding_window": c.model.window or c.model.seq} | cap


def _only(**keys: Any) -> Callable[[Config], dict[str, tuple]]:
    return lambda config: {key: value if isinstance(value, tuple) else (value,) for key, value in keys.items()}


def _letters(pattern: str) -> Callable[[Config], tuple]:
    """Accepts the key `window_pattern` if its layers with a window (w) and without (f) are those of `pattern`."""

    def accept(c: Config) -> tuple:
        expected = [letter == "w" for letter in (pattern * c.model.layers)[: c.model.layers]]
        return (c.model.window_pattern if [bool(window) for window in c.model.layer_windows] == expected else pattern,)

    return accept


def _bound_context(c: Config) -> dict[str, Any]:
    """The context ends where a window would begin to matter: llama.cpp has none there."""
    return {"context_length": min(c.model.seq, c.model.window)} if c.model.window else {}


def _needs_cap(c: Config) -> dict[str, tuple]:
    return {"attention_cap": (c.model.attention_cap or 50.0,), "logits_cap": (c.model.logits_cap or 30.0,)}


_LLAMA = Gguf("llama", neighbours, scalings=("linear", "llama3"), settings=_bound_context)
_GEMMA = _only(activation="geglu", attention_scale=None)
_ALTERNATING, _EVERY_SIXTH = _letters("wf"), _letters("wwwwwf")
GGUF = {
    "gpt2": Gguf("gpt2", joined=QKV, computes=_only(activation="gelu")),
    # GPT-J is a Phi-2 without biases of attention.
    "gptj": Gguf("phi2", zeros=("q_bias", "k_bias", "v_bias", "o_bias"), computes=_only(activation="gelu")),
    "gpt_neox": Gguf(
        "gptneox",
        joined=QKV,
        writes_head=True,
        settings=_neox_settings,
        computes=_only(activation=("gelu", "gelu_exact"), positions="rotary"),
    ),
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": _LLAMA,
    "qwen2": Gguf("qwen2"),
    "qwen3": Gguf("qwen3"),
    "gemma": Gguf("gemma", computes=_only(activation="geglu")),
    "gemma2": Gguf(
        "gemma2",
        settings=_gemma2_settings,
        computes=lambda c: (
            _GEMMA(c) | {"attention_cap": (c.model.attention_cap or 50.0,), "window_pattern": _ALTERNATING(c)}
        ),
    ),
    "gemma3_text": Gguf(
        "gemma3",
        settings=_gemma3_settings,
        computes=lambda c: _GEMMA(c) | {"window_pattern": _EVERY_SIXTH(c), "window_rotary_theta": (10_000.0,)},
    ),
    "phi": Gguf("phi2", computes=_only(activation="gelu")),
    "phi3": Gguf("phi3", joined=QKV | {"ffn_up": ("gate", "up")}, settings=_bound_context, scalings=()),
    "olmo": Gguf("olmo", neighbours),
    "olmo2": Gguf("olmo2", writes_head=True),
}
