"""Arcee: `ArceeForCausalLM`. Llama with a feed-forward without gate, whose activation is a squared relu."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.family import TO_ACTIVATIONS, read_activation
from shardformer.convert.families.hf_llama import LLAMA, list_layer, read_head_size, read_rotary, write_settings
from shardformer.convert.families.layout import Stored


def _read(theirs: dict) -> dict:
    heads = {"kv_heads": theirs["num_key_value_heads"] or theirs["num_attention_heads"]}
    return read_activation(theirs, "hidden_act") | heads | read_head_size(theirs) | read_rotary(theirs)


def _write(c: Config) -> dict:
    return write_settings(c) | {"hidden_act": TO_ACTIVATIONS[c.model.activation]}


def _layer(c: Config) -> list[Stored]:
    return [stored for stored in list_layer(c) if stored.parts[0].ours != "gate"]


ARCEE = dataclasses.replace(
    LLAMA,
    architecture="ArceeForCausalLM",
    defaults=LLAMA.defaults
    | {
        "hidden_size": 2560, "intermediate_size": 18_432, "hidden_act": "relu2", "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "bos_token_id": 128_000, "eos_token_id": 128_001,
    },
    read=_read,
    write=_write,
    layer=_layer,
    silent=(),
    harmless=(),
    variants=lambda c: LLAMA.variants(c) | {"activation": tuple(TO_ACTIVATIONS)},
)  # fmt: skip
