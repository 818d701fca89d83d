"""Gemma 2: `Gemma2ForCausalLM`. Every other layer has a window; attention's and the head's logits have caps."""

from shardformer.config import Config
from shardformer.convert.families import gemma
from shardformer.convert.families.family import ROPE_KEYS, Family
from shardformer.convert.families.hf_llama import LLAMA, list_outside, read_rotary, write_rotary
from shardformer.convert.families.layer_types import read_layer_types, read_window, to_keys

DEFAULTS = gemma.DEFAULTS | {
    "vocab_size": 256_000, "max_position_embeddings": 8192, "attn_logit_softcapping": 50.0,
    "final_logit_softcapping": 30.0,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    windows = to_keys(read_layer_types(theirs, "wf"), read_window(theirs))
    cap = {"attention_cap": gemma.read_cap(theirs, "attn_logit_softcapping")}
    return gemma.read_settings(theirs) | read_rotary(theirs) | windows | cap


def _write(c: Config) -> dict:
    return gemma.write_settings(c) | write_rotary(c) | {"attn_logit_softcapping": c.model.attention_cap}


GEMMA_2 = Family(
    architecture="Gemma2ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed=gemma.FIXED,
    ours=gemma.OURS,
    read=_read,
    write=_write,
    also=(*gemma.ALSO, "attn_logit_softcapping", *ROPE_KEYS),
    outside=list_outside,
    layer=gemma.list_layer,
    dropouts=("attention_dropout",),
    harmless=gemma.HARMLESS,
    variants=lambda c: gemma.find_variants(c) | {"attention_cap": None},
)
