"""Attention through latents as DeepSeek's families have it: its arrays, and YaRN that scales the attention logits."""

import functools
import math
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts
from shardformer.convert.families.family import find_rope, read_scaling, write_rope
from shardformer.convert.families.layout import Part, Stored, linear, neighbours, plain, show_by_head
from shardformer.errors import UsageError

NAMES = {
    "kv_latent": "kv_lora_rank", "q_latent": "q_lora_rank", "rotary_dims": "qk_rope_head_dim",
    "value_dim": "v_head_dim",
}  # fmt: skip
ALSO = ("qk_nope_head_dim", "num_key_value_heads", "head_dim", "qk_head_dim")
OF_YARN = ("mscale", "mscale_all_dim")


def read_latent(theirs: dict, of_yarn: tuple[str, ...] = OF_YARN) -> dict[str, Any]:
    """Returns our keys of heads and rotary positions. of_yarn: names of rope_type=yarn that a caller may add to."""
    check_experts(theirs, "kv_lora_rank", "v_head_dim", "qk_rope_head_dim", "qk_nope_head_dim")
    rotary, own, heads = theirs["qk_rope_head_dim"], theirs["qk_nope_head_dim"], theirs["num_attention_heads"]
    derived = {"head_dim": rotary, "qk_head_dim": rotary + own, "num_key_value_heads": heads}
    for key, expected in derived.items():
        if theirs.get(key) not in (None, expected):
            raise UsageError(f"{key}={theirs[key]!r:.80} is not computed here; expected {expected}")
    rope = find_rope(theirs, of_yarn)
    share = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UsageError(f"partial_rotary_factor={share!r:.80} is not computed by this family; expected 1.0")
    result = {"head_dim": rotary + own, "rotary_theta": float(rope.get("rope_theta", theirs.get("rope_theta", 10_000)))}
    if rope.get("mscale_all_dim"):
        grown = _grow(rope["factor"], rope["mscale_all_dim"])
        if grown != 1:
            result["attention_scale"] = (rotary + own) ** -0.5 * grown * grown
    return result | read_scaling(add_factor(rope), theirs["max_position_embeddings"])


def add_factor(rope: dict) -> dict:
    """Returns YaRN's object with the factor on queries and keys that `mscale` and `mscale_all_dim` stand for."""
    of_queries, of_logits = (rope.get(name) for name in OF_YARN)
    if not of_queries or not of_logits or rope.get("attention_factor") is not None:
        return rope
    return rope | {"attention_factor": _grow(rope["factor"], of_queries) / _grow(rope["factor"], of_logits)}


def _grow(factor: float, weight: float) -> float:
    """Returns the factor that YaRN gives queries and keys for a context that is `factor` times as long."""
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def write_latent(c: Config) -> dict[str, Any]:
    rope = write_rope(c)
    if c.model.attention_scale:
        grown = math.sqrt(c.model.attention_scale * math.sqrt(c.model.head_size))
        scales = c.model.rotary_factor * grown, grown
        rope |= {name: _invert(rope["factor"], scale) for name, scale in zip(OF_YARN, scales, strict=True)}
    older = {"rope_theta": c.model.rotary_theta} | ({"rope_scaling": rope} if c.model.rotary_scaling else {})
    return older | {
        "rope_parameters": rope,
        "v_head_dim": c.model.value_size,
        "qk_nope_head_dim": c.model.head_size - c.model.rotary_size,
        "num_key_value_heads": c.model.heads,
    }


def _invert(factor: float, grown: float) -> float:
    """Returns the weight for which `_grow` gives `grown`, without the last digits that rounding made."""
    return round((grown - 1) / (0.1 * math.log(factor)), 12)


def find_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values of our keys that these families compute."""
    scaling = c.model.parsed_scaling
    grows = scaling and scaling.kind == "yarn" and scaling.factor > 1
    return {
        "kv_latent": (c.model.kv_latent or "a width",),
        "kv_heads": (None, c.model.heads),
        "rotary_dims": None,
        "attention_scale": None if grows else (None,),
    }


def list_attention(c: Config) -> list[Stored]:
    """Lists the matrices and norms of a layer's attention; their heads have the rotary numbers of a query last."""
    D, H, K, R, V = c.model.d_model, c.model.heads, c.model.head_size, c.model.rotary_size, c.model.value_size
    C, Q, own, at = c.model.kv_latent or 0, c.model.q_latent, K - R, "model.layers.{}.self_attn"
    inputs, name = (Q, "q_b_proj") if Q else (D, "q_proj")
    columns = [(slice(0, own), slice(R, K)), (slice(own, K), slice(0, R))]  # theirs of a head, and ours
    parts = [Part("q", functools.partial(show_by_head, H, ours), (slice(None), theirs)) for theirs, ours in columns]
    reduced = [
        linear(f"{at}.q_a_proj", "q_latent", Q, D), plain(f"{at}.q_a_layernorm.weight", "q_latent_norm/scale", Q),
    ] if Q else []  # fmt: skip
    both = (*neighbours("k", c, H, (slice(0, own),)), *neighbours("v", c, H, (slice(own, None),)))
    return [
        *reduced,
        Stored(f"{at}.{name}.weight", (H * K, inputs), tuple(parts), seen=(H, K, inputs)),
        linear(f"{at}.kv_a_proj_with_mqa", "kv_latent", C + R, D),
        plain(f"{at}.kv_a_layernorm.weight", "kv_latent_norm/scale", C),
        Stored(f"{at}.kv_b_proj.weight", (H * (own + V), C), both, seen=(H, own + V, C)),
        linear(f"{at}.o_proj", "o", D, H * V),
    ]
