"""Families that are a Llama under another name: InternLM 3, IQuest-Coder and EXAONE 3."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.layout import Stored, rename

INTERNLM_3 = dataclasses.replace(
    LLAMA,
    architecture="InternLM3ForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 128_512, "intermediate_size": 10_240, "num_hidden_layers": 48, "num_key_value_heads": 2,
        "head_dim": 128, "max_position_embeddings": 32_768, "rms_norm_eps": 1e-5, "pad_token_id": 2,
    },
    aliases={"qkv_bias": "attention_bias", "bias": "mlp_bias"},
    silent=(),
    harmless=(),
)  # fmt: skip
IQUEST_CODER = dataclasses.replace(
    LLAMA,
    architecture="IQuestCoderForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 76_800, "hidden_size": 5120, "intermediate_size": 27_648, "num_hidden_layers": 80,
        "num_attention_heads": 40, "num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 131_072,
        "rms_norm_eps": 1e-5,
    },
    fixed=LLAMA.fixed | {"use_sliding_window": (False,)},
    silent=(),
    harmless=(),
)  # fmt: skip
# Llama's names, and those in EXAONE's files.
_EXAONE_NAMES = {
    r"model\.layers\.": "transformer.h.", r"model\.embed_tokens": "transformer.wte", r"model\.norm": "transformer.ln_f",
    r"self_attn\.o_proj": "self_attn.out_proj", "self_attn": "attn.attention", "input_layernorm": "ln_1",
    "post_attention_layernorm": "ln_2", "gate_proj": "c_fc_0", "up_proj": "c_fc_1", "down_proj": "c_proj",
}  # fmt: skip


def _list_outside(c: Config) -> list[Stored]:
    return rename(LLAMA.outside(c), _EXAONE_NAMES)


def _list_layer(c: Config) -> list[Stored]:
    return rename(LLAMA.layer(c), _EXAONE_NAMES)


EXAONE = dataclasses.replace(
    LLAMA,
    architecture="ExaoneForCausalLM",
    defaults=LLAMA.defaults
    | {
        "vocab_size": 102_400, "intermediate_size": 14_336, "num_key_value_heads": 8, "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5, "rope_theta": 500_000.0, "eos_token_id": 361, "pad_token_id": 0,
    },
    outside=_list_outside,
    layer=_list_layer,
    dropouts=(*LLAMA.dropouts, "embed_dropout"),
    aliases={
        "num_layers": "num_hidden_layers", "layer_norm_epsilon": "rms_norm_eps", "activation_function": "hidden_act",
    },
    silent=(),
    harmless=(),
)  # fmt: skip
