"""GPT-J: `GPTJForCausalLM`."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    GPT_ALIASES,
    GPT_NAMES,
    LAYERNORM,
    TO_ACTIVATIONS,
    Family,
    read_activation,
)
from shardformer.convert.families.layout import Stored, head, linear, norm, plain, table
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 50400, "n_positions": 2048, "n_embd": 4096, "n_layer": 28, "n_head": 16, "rotary_dim": 64,
    "n_inner": None, "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": False,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    if not theirs["rotary_dim"]:
        raise UsageError(f"rotary_dim={theirs['rotary_dim']!r}: the number of dimensions that rotate is missing")
    return read_activation(theirs, "activation_function") | {"rotary_dims": theirs["rotary_dim"]}


def _write(c: Config) -> dict:
    return {"activation_function": TO_ACTIVATIONS[c.model.activation], "rotary_dim": c.model.rotary_size}


def _outside(c: Config) -> list[Stored]:
    return [table("transformer.wte.weight", c), *norm("transformer.ln_f", "head/norm", c), *head("lm_head", c)]


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "transformer.h.{}"
    return [
        *norm(f"{at}.ln_1", "norm", c),
        *[linear(f"{at}.attn.{name}_proj", name, D, D) for name in "qkv"],
        linear(f"{at}.attn.out_proj", "o", D, D),
        linear(f"{at}.mlp.fc_in", "up", F, D),
        plain(f"{at}.mlp.fc_in.bias", "up_bias", F),
        linear(f"{at}.mlp.fc_out", "down", D, F),
        plain(f"{at}.mlp.fc_out.bias", "down_bias", D),
    ]


GPTJ = Family(
    architecture="GPTJForCausalLM",
    names=GPT_NAMES,
    defaults=DEFAULTS,
    # Attention is always divided by sqrt(head size), and rotary positions have no switch, in transformers' GPT-J.
    fixed={"tie_word_embeddings": (False,), "scale_attn_weights": (True,), "rotary": (True,)},
    ours=LAYERNORM | {"block": "parallel", "bias": "ff", "positions": "rotary"},
    read=_read,
    write=_write,
    also=("activation_function", "rotary_dim"),
    outside=_outside,
    layer=_layer,
    dropouts=("attn_pdrop", "embd_pdrop", "resid_pdrop"),
    silent=("n_ctx",),
    aliases=GPT_ALIASES,
    variants=lambda c: {"tied": (False,), "rotary_dims": None},
)
