"""Helium: `HeliumForCausalLM`. Llama whose rotary pairs are neighbours, as GPT-J's."""

import dataclasses

from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.layout import neighbours

HELIUM = dataclasses.replace(
    LLAMA,
    architecture="HeliumForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 48_000, "hidden_size": 2560, "intermediate_size": 7040, "num_hidden_layers": 24,
        "num_attention_heads": 20, "num_key_value_heads": 20, "head_dim": 128, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-8, "rope_theta": 100_000.0, "pad_token_id": 3,
    },
    layer=lambda c: list_layer(c, neighbours),
    silent=(),
    harmless=(),
)  # fmt: skip
