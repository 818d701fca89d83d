"""BioGPT: `BioGptForCausalLM`. OPT with scaled tokens."""

import dataclasses
import math
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, TO_ACTIVATIONS, read_activation
from shardformer.convert.families.hf_opt import OPT, place_positions
from shardformer.convert.families.layout import Stored, head, norm, rename, table

DEFAULTS = {
    "vocab_size": 42_384, "hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16,
    "intermediate_size": 4096, "max_position_embeddings": 1024, "hidden_act": "gelu", "scale_embedding": True,
    "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 2, "pad_token_id": 1,
}  # fmt: skip


def _read(theirs: dict) -> dict[str, Any]:
    return read_activation(theirs, "hidden_act") | {"embed_scale": None if theirs["scale_embedding"] else 1.0}


def _write(c: Config) -> dict[str, Any]:
    return {"hidden_act": TO_ACTIVATIONS[c.model.activation], "scale_embedding": c.model.embed_scale != 1}


def _outside(c: Config) -> list[Stored]:
    return [
        table("biogpt.embed_tokens.weight", c),
        place_positions("biogpt.embed_positions.weight", c),
        *norm("biogpt.layer_norm", "head/norm", c),
        *head("output_projection", c),
    ]


def _layer(c: Config) -> list[Stored]:
    return rename(OPT.layer(c), {r"model\.decoder\.": "biogpt."})


BIOGPT = dataclasses.replace(
    OPT,
    architecture="BioGptForCausalLM",
    names=HIDDEN_NAMES,
    defaults=DEFAULTS,
    fixed={},
    ours=OPT.ours | {"block": "sequential"},
    read=_read,
    write=_write,
    also=("hidden_act", "scale_embedding"),
    outside=_outside,
    layer=_layer,
    dropouts=("hidden_dropout_prob", "attention_probs_dropout_prob"),
    silent=("layerdrop", "layer_norm_eps"),  # its norms have eps=1e-5, whatever layer_norm_eps is
    variants=lambda c: {"embed_scale": (None, 1.0, math.sqrt(c.model.d_model))},
)
