"""Llama and what has its form (Vicuna, SmolLM2, TinyLlama): `LlamaForCausalLM`."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    GATED_ACTIVATIONS,
    HIDDEN_NAMES,
    ROPE_KEYS,
    Family,
    find_rope,
    read_activation,
    read_scaling,
    write_rope,
)
from shardformer.convert.families.layout import Pairs, Stored, half_split, head, linear, norm, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": None, "head_dim": None, "hidden_act": "silu",
    "max_position_embeddings": 2048, "rms_norm_eps": 1e-6, "tie_word_embeddings": False,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None,
}  # fmt: skip


def read_head_size(theirs: dict) -> dict:
    """Returns our key `head_dim`: None where it follows from the width and the number of heads."""
    size, heads = theirs["head_dim"], theirs["num_attention_heads"]
    return {"head_dim": None if not size or size * heads == theirs["hidden_size"] else size}


def read_rotary(theirs: dict) -> dict:
    """Returns our keys of rotary positions in which all dimensions of a head rotate."""
    rope = find_rope(theirs)
    share = rope.get("partial_rotary_factor", theirs.get("partial_rotary_factor"))
    if share not in (None, 1):
        raise UsageError(f"partial_rotary_factor={share!r:.80} is not computed by this family; expected 1.0")
    theta = rope.get("rope_theta", theirs.get("rope_theta", 10_000))
    return {"rotary_theta": float(theta)} | read_scaling(rope, theirs["max_position_embeddings"])


def write_rotary(c: Config) -> dict:
    # Libraries of before `rope_parameters` read the older names.
    older = {"rope_theta": c.model.rotary_theta} | ({"rope_scaling": write_rope(c)} if c.model.rotary_scaling else {})
    return older | {"rope_parameters": write_rope(c)}


def read_settings(theirs: dict) -> dict:
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    activation = read_activation(theirs, "hidden_act", GATED_ACTIVATIONS)
    return activation | heads | read_head_size(theirs) | read_rotary(theirs)


def write_settings(c: Config) -> dict:
    heads = {"num_key_value_heads": c.model.key_value_heads, "head_dim": c.model.head_size}
    return {"hidden_act": "silu"} | heads | write_rotary(c)


def list_outside(c: Config) -> list[Stored]:
    return [table("model.embed_tokens.weight", c), *norm("model.norm", "head/norm", c), *head("lm_head", c)]


def list_projections(c: Config, pairs: Pairs = half_split) -> list[Stored]:
    """Lists the matrices of a layer; `pairs` lists the parts of a projection with rotary pairs."""
    D, F, H, K, at = c.model.d_model, c.model.ff_size, c.model.heads, c.model.head_size, "model.layers.{}"
    rotated = [
        Stored(f"{at}.self_attn.{name}_proj.weight", (heads * K, D), pairs(name, c, heads), seen=(heads, K, D))
        for name, heads in (("q", H), ("k", c.model.key_value_heads))
    ]
    return [
        *rotated,
        linear(f"{at}.self_attn.v_proj", "v", c.model.key_value_heads * K, D),
        linear(f"{at}.self_attn.o_proj", "o", D, H * K),
        linear(f"{at}.mlp.gate_proj", "gate", F, D),
        linear(f"{at}.mlp.up_proj", "up", F, D),
        linear(f"{at}.mlp.down_proj", "down", D, F),
    ]


def list_layer(c: Config, pairs: Pairs = half_split) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        *list_projections(c, pairs),
    ]


LLAMA = Family(
    architecture="LlamaForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "rms_norm_eps"},
    defaults=DEFAULTS,
    fixed={"attention_bias": (False,), "mlp_bias": (False,), "rope_interleaved": (False,)},
    ours={"norm": "rmsnorm", "embed": "plain", "block": "sequential", "bias": "none", "positions": "rotary"},
    read=read_settings,
    write=write_settings,
    also=("hidden_act", "num_key_value_heads", "head_dim", *ROPE_KEYS),
    outside=list_outside,
    layer=list_layer,
    dropouts=("attention_dropout",),
    silent=("pretraining_tp",),
    harmless=("max_sequence_length", "is_llama_config", "internal_version"),  # the last is ALLaM's
    variants=lambda c: {
        "activation": ("swiglu",),
        "head_dim": None,
        "rotary_dims": (None, c.model.head_size),
        "rotary_scaling": None,
        "rotary_theta": None,
        "kv_heads": None,
    },
)
