"""Granite-MoE, also with a shared expert: `GraniteMoeForCausalLM`, `GraniteMoeSharedForCausalLM`."""

import dataclasses

import numpy as np

from shardformer.config import Config
from shardformer.convert.families.expert_arrays import check_experts, list_joined, replace_dense
from shardformer.convert.families.hf_granite import GRANITE
from shardformer.convert.families.hf_mixtral import MIXTRAL
from shardformer.convert.families.layout import Part, Stored, linear


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}.block_sparse_moe"
    experts = [
        linear(f"{at}.router.layer", "router", c.experts.experts, c.model.d_model),
        *list_joined(c, f"{at}.input_linear.weight", f"{at}.output_linear.weight"),
    ]
    return replace_dense(c, GRANITE.layer(c), experts)


def _layer_with_shared(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.experts.shared_width, "model.layers.{}.shared_mlp"
    if not F:
        return _layer(c)
    joined = tuple(Part(name, np.transpose, (i,)) for i, name in enumerate(("shared_gate", "shared_up")))
    return [
        *_layer(c),
        Stored(f"{at}.input_linear.weight", (2 * F, D), joined, seen=(2, F, D)),
        linear(f"{at}.output_linear", "shared_down", D, F),
    ]


def _read(theirs: dict) -> dict:
    check_experts(theirs, "num_local_experts")
    return GRANITE.read(theirs)


GRANITE_MOE = dataclasses.replace(
    GRANITE,
    architecture="GraniteMoeForCausalLM",
    names=MIXTRAL.names,
    defaults=GRANITE.defaults | {"num_local_experts": 8, "num_experts_per_tok": 2},
    fixed={"attention_bias": (False,)},
    read=_read,
    layer=_layer,
    silent=("output_router_logits", "router_aux_loss_coef"),
)
GRANITE_MOE_SHARED = dataclasses.replace(
    GRANITE_MOE,
    architecture="GraniteMoeSharedForCausalLM",
    names=GRANITE_MOE.names | {"shared_width": "shared_intermediate_size"},
    defaults=GRANITE_MOE.defaults | {"shared_intermediate_size": 0},
    layer=_layer_with_shared,
)
