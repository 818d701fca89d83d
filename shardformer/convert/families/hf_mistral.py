"""Mistral: `MistralForCausalLM`. Llama with a window in every layer, or without windows since version 0.2."""

from shardformer.config import Config
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_llama import LLAMA, read_settings, write_settings
from shardformer.convert.families.layer_types import check_layers, read_window

DEFAULTS = LLAMA.defaults | {
    "intermediate_size": 14336, "num_key_value_heads": 8, "max_position_embeddings": 131_072, "sliding_window": 4096,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    result = read_settings(theirs)
    if theirs["sliding_window"] is None:
        return result
    check_layers(theirs)
    return result | {"window": read_window(theirs)}


def _write(c: Config) -> dict:
    return write_settings(c) | {"sliding_window": c.model.window}


MISTRAL = Family(
    architecture="MistralForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    ours=LLAMA.ours,
    read=_read,
    write=_write,
    also=(*LLAMA.also, "sliding_window"),
    outside=LLAMA.outside,
    layer=LLAMA.layer,
    dropouts=LLAMA.dropouts,
    harmless=("document_attention",),  # of DictaLM, which transformers does not read either
    variants=lambda c: LLAMA.variants(c) | {"window": None},
)
