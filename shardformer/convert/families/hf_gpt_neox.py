"""GPT-NeoX and Pythia: `GPTNeoXForCausalLM`."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    HIDDEN_NAMES,
    LAYERNORM,
    ROPE_KEYS,
    TO_ACTIVATIONS,
    Family,
    find_rope,
    read_activation,
    read_scaling,
    reject_differences,
    share_rotating,
    write_rope,
)
from shardformer.convert.families.layout import Part, Stored, half_split, head, linear, norm, plain, table

DEFAULTS = {
    "vocab_size": 50432, "hidden_size": 6144, "num_hidden_layers": 44, "num_attention_heads": 64,
    "intermediate_size": 24576, "hidden_act": "gelu", "max_position_embeddings": 2048, "layer_norm_eps": 1e-5,
    "tie_word_embeddings": False, "use_parallel_residual": True, "bos_token_id": 0, "eos_token_id": 2,
    "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    rope, head_size = find_rope(theirs), theirs["hidden_size"] // theirs["num_attention_heads"]
    theta = rope.get("rope_theta", theirs.get("rotary_emb_base", 10_000))
    share = rope.get("partial_rotary_factor", theirs.get("rotary_pct", 0.25))
    reject_differences(theirs, "the base of the rotary frequencies", theta, ("rope_theta",))
    reject_differences(theirs, "the rotating share of a head", share, ("partial_rotary_factor",))
    dims = int(head_size * share)
    positions = {"positions": "rotary", "rotary_dims": dims} if dims else {"positions": "none"}
    block = "parallel_two_norms" if theirs["use_parallel_residual"] else "sequential"
    result = positions | {"rotary_theta": float(theta), "block": block} | read_activation(theirs, "hidden_act")
    return result | read_scaling(rope, theirs["max_position_embeddings"])


def _write(c: Config) -> dict:
    share = share_rotating(c) if c.model.positions == "rotary" else 0.0
    return {
        # Libraries of before `rope_parameters` read the older names.
        "rotary_pct": share,
        "rotary_emb_base": c.model.rotary_theta,
        "rope_parameters": write_rope(c) | {"partial_rotary_factor": share},
        "use_parallel_residual": c.model.block == "parallel_two_norms",
        "hidden_act": TO_ACTIVATIONS[c.model.activation],
    }


def _outside(c: Config) -> list[Stored]:
    return [
        table("gpt_neox.embed_in.weight", c), *norm("gpt_neox.final_layer_norm", "head/norm", c), *head("embed_out", c)
    ]  # fmt: skip


def list_layer(c: Config, at: str = "gpt_neox.layers.{}", attention: str = "attention") -> list[Stored]:
    D, F, H, K = c.model.d_model, c.model.ff_size, c.model.heads, c.model.head_size
    qkv: list[Part] = []
    qkv_bias: list[Part] = []
    for j, name in enumerate("qkv"):
        config = c if name != "v" else c.replace(positions="none")  # values do not rotate
        qkv += half_split(name, config, H, (j,))
        qkv_bias += half_split(f"{name}_bias", config, H, (j,))
    return [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
        Stored(f"{at}.{attention}.query_key_value.weight", (3 * D, D), tuple(qkv), seen=(H, 3, K, D)),
        Stored(f"{at}.{attention}.query_key_value.bias", (3 * D,), tuple(qkv_bias), seen=(H, 3, K)),
        linear(f"{at}.{attention}.dense", "o", D, D),
        plain(f"{at}.{attention}.dense.bias", "o_bias", D),
        linear(f"{at}.mlp.dense_h_to_4h", "up", F, D),
        plain(f"{at}.mlp.dense_h_to_4h.bias", "up_bias", F),
        linear(f"{at}.mlp.dense_4h_to_h", "down", D, F),
        plain(f"{at}.mlp.dense_4h_to_h.bias", "down_bias", D),
    ]


GPT_NEOX = Family(
    architecture="GPTNeoXForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"},
    defaults=DEFAULTS,
    fixed={"attention_bias": (True,)},
    ours=LAYERNORM | {"bias": "all", "positions": "rotary", "head_bias": False},
    read=_read,
    write=_write,
    also=("hidden_act", "rotary_pct", "rotary_emb_base", "use_parallel_residual", *ROPE_KEYS),
    outside=_outside,
    layer=list_layer,
    dropouts=("attention_dropout", "hidden_dropout"),
    harmless=("attention_probs_dropout_prob", "hidden_dropout_prob", "use_deepspeed_checkpointing"),
    variants=lambda c: {
        "block": ("parallel_two_norms", "sequential"),
        "positions": ("rotary", "none"),
        "rotary_dims": None,
        "rotary_scaling": None,
        "rotary_theta": None,
    },
)
