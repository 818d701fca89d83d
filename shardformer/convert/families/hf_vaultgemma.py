"""VaultGemma: `VaultGemmaForCausalLM`. Gemma 2 without the norms after its branches."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.gemma import list_layer
from shardformer.convert.families.hf_gemma2 import GEMMA_2
from shardformer.convert.families.layout import Stored


def _layer(c: Config) -> list[Stored]:
    return [stored for stored in list_layer(c) if not stored.parts[0].ours.startswith("post_")]


VAULT_GEMMA = dataclasses.replace(
    GEMMA_2,
    architecture="VaultGemmaForCausalLM",
    fixed={"attention_bias": (False,)},
    ours=GEMMA_2.ours | {"block": "sequential"},
    layer=_layer,
)
