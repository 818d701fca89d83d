"""Ministral: `MinistralForCausalLM`. Mistral with the kind of each layer in `layer_types`."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, read_settings, write_settings
from shardformer.convert.families.hf_mistral import MISTRAL
from shardformer.convert.families.layer_types import (
    FULL,
    SLIDING,
    find_window_variants,
    list_types,
    read_layer_types,
    read_window,
    to_keys,
)


def _read(theirs: dict) -> dict:
    window = theirs["sliding_window"]
    letters = read_layer_types(theirs, "f" if window is None else "w")
    return read_settings(theirs) | to_keys(letters, read_window(theirs) if "w" in letters else 0)


def _write(c: Config) -> dict:
    window = c.model.window or c.model.seq  # without a number, transformers fails even if all layers are full
    return write_settings(c) | {"sliding_window": window, "layer_types": list_types(c, SLIDING, FULL)}


MINISTRAL = dataclasses.replace(
    MISTRAL,
    architecture="MinistralForCausalLM",
    read=_read,
    write=_write,
    also=(*MISTRAL.also, "layer_types"),
    variants=lambda c: LLAMA.variants(c) | find_window_variants(c),
)
