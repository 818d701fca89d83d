"""Mixtral: `MixtralForCausalLM`. Mistral with experts instead of the feed-forward."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts, list_experts, replace_dense
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_mistral import MISTRAL
from shardformer.convert.families.layout import Stored

NAMES = {"expert_gate": "w1", "expert_up": "w3", "expert_down": "w2"}


def _layer(c: Config) -> list[Stored]:
    return replace_dense(c, LLAMA.layer(c), list_experts(c, "model.layers.{}.block_sparse_moe", NAMES))


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_local_experts")
    return MISTRAL.read(theirs)


MIXTRAL = dataclasses.replace(
    MISTRAL,
    architecture="MixtralForCausalLM",
    names=MISTRAL.names | {"experts": "num_local_experts", "experts_per_token": "num_experts_per_tok"},
    defaults=MISTRAL.defaults
    | {"num_local_experts": 8, "num_experts_per_tok": 2, "rms_norm_eps": 1e-5, "sliding_window": None},
    read=_read,
    layer=_layer,
    silent=("output_router_logits", "router_aux_loss_coef", "router_jitter_noise"),
)
