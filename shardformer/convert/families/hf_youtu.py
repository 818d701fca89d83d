"""Youtu-LLM: `YoutuForCausalLM`. Llama with DeepSeek's attention through latents."""

import dataclasses

from shardformer.convert.families import latent_arrays
from shardformer.convert.families.hf_deepseek import list_dense, read_dense, write_dense
from shardformer.convert.families.hf_llama import LLAMA

YOUTU = dataclasses.replace(
    LLAMA,
    architecture="YoutuForCausalLM",
    names=LLAMA.names | latent_arrays.NAMES,
    defaults={key: value for key, value in LLAMA.defaults.items() if key != "head_dim"}
    | {
        "vocab_size": 128_256, "hidden_size": 2048, "intermediate_size": 6144, "num_attention_heads": 16,
        "num_key_value_heads": 16, "max_position_embeddings": 131_072, "kv_lora_rank": 512, "q_lora_rank": 1536,
        "qk_rope_head_dim": 64, "v_head_dim": 128, "qk_nope_head_dim": 128, "tie_word_embeddings": True,
        "bos_token_id": 128_000, "eos_token_id": 128_001,
    },
    fixed={"attention_bias": (False,), "mlp_bias": (False,), "rope_interleave": (True,)},
    read=read_dense,
    write=write_dense,
    also=(*LLAMA.also, *latent_arrays.ALSO),
    layer=list_dense,
    silent=("embedding_initializer_range",),
    harmless=(),
    variants=lambda c: LLAMA.variants(c) | latent_arrays.find_variants(c),
)  # fmt: skip
