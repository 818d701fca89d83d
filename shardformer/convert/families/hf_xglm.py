"""XGLM: `XGLMForCausalLM`. OPT with fixed sinusoids as its positions."""

import math

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, LAYERNORM, Family, read_activation
from shardformer.convert.families.hf_gpt2 import write_activation
from shardformer.convert.families.hf_opt import OPT
from shardformer.convert.families.layout import Stored, head, norm, rename, table

DEFAULTS = {
    "vocab_size": 256_008, "d_model": 1024, "num_layers": 24, "attention_heads": 16, "ffn_dim": 4096,
    "max_position_embeddings": 2048, "activation_function": "gelu", "scale_embedding": True,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    return read_activation(theirs, "activation_function") | {"embed_scale": None if theirs["scale_embedding"] else 1.0}


def _write(c: Config) -> dict:
    return write_activation(c) | {"scale_embedding": c.model.embed_scale != 1}


def _outside(c: Config) -> list[Stored]:
    return [table("model.embed_tokens.weight", c), *norm("model.layer_norm", "head/norm", c), *head("lm_head", c)]


def _layer(c: Config) -> list[Stored]:
    return rename(OPT.layer(c), {r"model\.decoder\.": "model."})


XGLM = Family(
    architecture="XGLMForCausalLM",
    names=HIDDEN_NAMES | {"d_ff": "ffn_dim", "layers": "num_layers", "d_model": "d_model", "heads": "attention_heads"},
    defaults=DEFAULTS,
    fixed={"add_cross_attention": (False,)},
    ours=LAYERNORM
    | {"block": "sequential", "bias": "all", "positions": "sinusoids", "head_bias": False, "norm_eps": 1e-5},
    read=_read,
    write=_write,
    also=("activation_function", "scale_embedding"),
    outside=_outside,
    layer=_layer,
    dropouts=("dropout", "attention_dropout"),
    silent=("init_std", "layerdrop"),
    harmless=("activation_dropout",),
    aliases={"num_hidden_layers": "num_layers", "hidden_size": "d_model", "num_attention_heads": "attention_heads"},
    variants=lambda c: {"embed_scale": (None, 1.0, math.sqrt(c.model.d_model))},
)
