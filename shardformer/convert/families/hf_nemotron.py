"""Nemotron 4 and Minitron: `NemotronForCausalLM`. Layer norms with 1 + scale, squared relu, partly rotating heads."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    HIDDEN_NAMES,
    ROPE_KEYS,
    TO_ACTIVATIONS,
    Family,
    read_activation,
    read_partial_rotary,
    write_partial_rotary,
)
from shardformer.convert.families.hf_arcee import ARCEE
from shardformer.convert.families.hf_llama import LLAMA, read_head_size

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 256_000, "hidden_size": 6144, "intermediate_size": 24_576, "num_attention_heads": 48,
    "hidden_act": "relu2", "max_position_embeddings": 4096, "norm_eps": 1e-5, "partial_rotary_factor": 0.5,
    "bos_token_id": 2, "eos_token_id": 3,
}  # fmt: skip
del DEFAULTS["rms_norm_eps"]


def _read(theirs: dict) -> dict:
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    return read_activation(theirs, "hidden_act") | heads | read_head_size(theirs) | read_partial_rotary(theirs)


def _write(c: Config) -> dict:
    return write_partial_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "head_dim": c.model.head_size,
        "hidden_act": TO_ACTIVATIONS[c.model.activation],
    }


NEMOTRON = Family(
    architecture="NemotronForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "norm_eps"},
    defaults=DEFAULTS,
    fixed={"attention_bias": (False,), "mlp_bias": (False,)},
    ours=LLAMA.ours | {"norm": "layernorm_plus_one", "bias": "norm"},
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", "head_dim", *ROPE_KEYS),
    outside=LLAMA.outside,
    layer=ARCEE.layer,
    dropouts=LLAMA.dropouts,
    variants=lambda c: ARCEE.variants(c) | {"rotary_dims": None},
)
