"""GPT-1: `OpenAIGPTLMHeadModel`. GPT-2's arrays, with norms after the residual sums and none in front of the head."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.family import read_activation
from shardformer.convert.families.hf_gpt2 import GPT2
from shardformer.convert.families.layout import Stored, head, plain, table

ACTIVATIONS = {"gelu": "gelu", "relu": "relu", "silu": "silu", "swish": "silu"}  # its gelu is the tanh form


def _read(theirs: dict) -> dict:
    return read_activation(theirs, "afn", ACTIVATIONS) | {"d_ff": None}


def _write(c: Config) -> dict:
    return {"afn": c.model.activation}


def _outside(c: Config) -> list[Stored]:
    positions = plain("transformer.positions_embed.weight", "embed/positions", c.model.seq, c.model.d_model)
    return [table("transformer.tokens_embed.weight", c), positions, *head("lm_head", c)]


def _vary(c: Config) -> dict[str, tuple | None]:
    return {"activation": tuple(ACTIVATIONS.values()), "d_ff": (None, 4 * c.model.d_model)}


OPENAI_GPT = dataclasses.replace(
    GPT2,
    architecture="OpenAIGPTLMHeadModel",
    names={ours: theirs for ours, theirs in GPT2.names.items() if ours != "d_ff"},
    defaults={
        "vocab_size": 40478, "n_positions": 512, "n_embd": 768, "n_layer": 12, "n_head": 12, "afn": "gelu",
        "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None,
        "pad_token_id": None,
    },
    fixed={},
    ours=GPT2.ours | {"block": "sequential_sum_norms"},
    read=_read,
    write=_write,
    also=("afn",),
    outside=_outside,
    silent=("n_ctx",),
    variants=_vary,
)  # fmt: skip
