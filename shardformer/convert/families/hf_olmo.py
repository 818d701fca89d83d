"""OLMo 1: `OlmoForCausalLM`. Llama with norms that have no parameters."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, list_projections
from shardformer.convert.families.layout import Stored, head, table

DEFAULTS = {key: value for key, value in LLAMA.defaults.items() if key != "rms_norm_eps"} | {
    "vocab_size": 50_304, "bos_token_id": None, "eos_token_id": 50_279, "pad_token_id": 1,
}  # fmt: skip


def _outside(c: Config) -> list[Stored]:
    return [table("model.embed_tokens.weight", c), *head("lm_head", c)]


OLMO = dataclasses.replace(
    LLAMA,
    architecture="OlmoForCausalLM",
    names={ours: theirs for ours, theirs in LLAMA.names.items() if ours != "norm_eps"},
    defaults=DEFAULTS,
    fixed={"attention_bias": (False,), "clip_qkv": (None,)},
    ours=LLAMA.ours | {"norm": "plain_layernorm", "norm_eps": 1e-5},
    outside=_outside,
    layer=list_projections,
    silent=("pretraining_tp",),
    harmless=(),
)
