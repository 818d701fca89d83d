"""Jais 2: `Jais2ForCausalLM`. StarCoder 2 with Llama's names, all heads' keys, and a squared relu."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, TO_ACTIVATIONS
from shardformer.convert.families.hf_arcee import ARCEE
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_starcoder2 import STARCODER_2, list_biased_layer
from shardformer.errors import UsageError

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 150_272, "hidden_size": 3328, "intermediate_size": 26_624, "num_attention_heads": 26,
    "hidden_act": "relu2", "max_position_embeddings": 8192, "layer_norm_eps": 1e-5, "attention_bias": True,
    "mlp_bias": True, "bos_token_id": 0, "eos_token_id": 150_024,
}  # fmt: skip
del DEFAULTS["rms_norm_eps"]


def _read(theirs: dict) -> dict:
    biased = bool(theirs["attention_bias"])
    if bool(theirs["mlp_bias"]) != biased:
        raise UsageError(f"mlp_bias={theirs['mlp_bias']!r:.80} is not computed here with attention_bias={biased}")
    return ARCEE.read(theirs) | {"bias": "all" if biased else "norm"}


def _write(c: Config) -> dict:
    biased = c.model.bias == "all"
    return ARCEE.write(c) | {"attention_bias": biased, "mlp_bias": biased}


JAIS_2 = dataclasses.replace(
    STARCODER_2,
    architecture="Jais2ForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"},
    defaults=DEFAULTS,
    read=_read,
    write=_write,
    also=LLAMA.also,
    layer=lambda c: list_biased_layer(c, "up_proj", "down_proj"),
    dropouts=LLAMA.dropouts,
    harmless=(),
    variants=lambda c: LLAMA.variants(c) | {"activation": tuple(TO_ACTIVATIONS), "bias": ("all", "norm")},
)
