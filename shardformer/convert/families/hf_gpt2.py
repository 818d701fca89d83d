"""GPT-2: `GPT2LMHeadModel`."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    GPT_ALIASES,
    GPT_NAMES,
    LAYERNORM,
    TO_ACTIVATIONS,
    Family,
    read_activation,
)
from shardformer.convert.families.layout import Part, Stored, head, norm, plain, table

DEFAULTS = {
    "vocab_size": 50257, "n_positions": 1024, "n_embd": 768, "n_layer": 12, "n_head": 12, "n_inner": None,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    return read_activation(theirs, "activation_function")


def write_activation(c: Config) -> dict:
    return {"activation_function": TO_ACTIVATIONS[c.model.activation]}


def list_outside(c: Config) -> list[Stored]:
    positions = plain("transformer.wpe.weight", "embed/positions", c.model.seq, c.model.d_model)
    return [
        table("transformer.wte.weight", c), positions, *norm("transformer.ln_f", "head/norm", c), *head("lm_head", c)
    ]  # fmt: skip


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "transformer.h.{}"
    qkv = tuple(Part(name, cut=(slice(None), j)) for j, name in enumerate("qkv"))
    qkv_bias = tuple(Part(f"{name}_bias", cut=(j,)) for j, name in enumerate("qkv"))
    return [  # its Conv1D keeps [inputs, outputs]
        *norm(f"{at}.ln_1", "attention_norm", c),
        Stored(f"{at}.attn.c_attn.weight", (D, 3 * D), qkv, seen=(D, 3, D)),
        Stored(f"{at}.attn.c_attn.bias", (3 * D,), qkv_bias, seen=(3, D)),
        plain(f"{at}.attn.c_proj.weight", "o", D, D),
        plain(f"{at}.attn.c_proj.bias", "o_bias", D),
        *norm(f"{at}.ln_2", "feed_forward_norm", c),
        plain(f"{at}.mlp.c_fc.weight", "up", D, F),
        plain(f"{at}.mlp.c_fc.bias", "up_bias", F),
        plain(f"{at}.mlp.c_proj.weight", "down", F, D),
        plain(f"{at}.mlp.c_proj.bias", "down_bias", D),
    ]


GPT2 = Family(
    architecture="GPT2LMHeadModel",
    names=GPT_NAMES,
    defaults=DEFAULTS,
    fixed={
        "scale_attn_weights": (True,),
        "scale_attn_by_inverse_layer_idx": (False,),
        "add_cross_attention": (False,),
    },
    ours=LAYERNORM | {"block": "sequential", "bias": "all", "positions": "learned", "head_bias": False},
    read=_read,
    write=write_activation,
    also=("activation_function",),
    outside=list_outside,
    layer=_layer,
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    silent=("n_ctx", "reorder_and_upcast_attn"),
    aliases=GPT_ALIASES,
)
