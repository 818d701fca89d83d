"""FlexOlmo: `FlexOlmoForCausalLM`. OLMo 2 with experts instead of the feed-forward."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import QWEN_NAMES, check_experts, list_experts, replace_dense
from shardformer.convert.families.hf_olmo2 import OLMO_2
from shardformer.convert.families.hf_olmoe import OLMOE
from shardformer.convert.families.layout import Stored


def _layer(c: Config) -> list[Stored]:
    return replace_dense(c, OLMO_2.layer(c), list_experts(c, "model.layers.{}.mlp", QWEN_NAMES))


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_experts")
    return OLMO_2.read(theirs)


FLEX_OLMO = dataclasses.replace(
    OLMO_2,
    architecture="FlexOlmoForCausalLM",
    names=OLMOE.names,
    defaults=OLMO_2.defaults
    | {
        "vocab_size": 100_352, "max_position_embeddings": 4096, "rms_norm_eps": 1e-6, "rope_theta": 500_000.0,
        "num_experts": 7, "num_experts_per_tok": 5, "norm_topk_prob": False, "eos_token_id": 100_257,
        "pad_token_id": 100_277,
    },
    read=_read,
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},
    silent=("output_router_logits", "router_aux_loss_coef"),
)  # fmt: skip
