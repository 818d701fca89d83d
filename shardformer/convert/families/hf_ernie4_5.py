"""ERNIE 4.5 without experts: `Ernie4_5ForCausalLM`. Llama whose rotary pairs are neighbours, as GPT-J's."""

import dataclasses

from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.layout import neighbours

ERNIE_4_5 = dataclasses.replace(
    LLAMA,
    architecture="Ernie4_5ForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 103_424, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 18,
        "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "tie_word_embeddings": True, "pad_token_id": 0,
    },
    fixed={"use_bias": (False,)},
    layer=lambda c: list_layer(c, neighbours),
    dropouts=(),
    silent=(),
    harmless=(),
)  # fmt: skip
