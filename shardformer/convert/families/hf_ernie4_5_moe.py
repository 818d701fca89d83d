"""ERNIE 4.5 with experts: `Ernie4_5_MoeForCausalLM`. The dense one's attention, and a softmax with balanced biases."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.balanced_experts import read_balanced, write_balanced
from shardformer.convert.families.expert_arrays import (
    QWEN_NAMES,
    list_experts,
    list_shared,
    replace_dense,
    show_as_row,
    to_keys,
)
from shardformer.convert.families.hf_ernie4_5 import ERNIE_4_5
from shardformer.convert.families.layer_types import check_layers
from shardformer.convert.families.layout import Part, Stored
from shardformer.errors import UsageError

NAMES = {"experts": "moe_num_experts", "experts_per_token": "moe_k", "expert_width": "moe_intermediate_size"}
SHARED = "moe_num_shared_experts"
FIRST, LAST, EVERY = "moe_layer_start_index", "moe_layer_end_index", "moe_layer_interval"


def _read(theirs: dict) -> dict[str, Any]:
    layers, first, last, every = check_layers(theirs), theirs[FIRST], theirs[LAST], theirs[EVERY]
    if not all(type(number) is int for number in (first, last, every)) or every < 1:
        raise UsageError(f"{EVERY}={every!r:.80} from {first!r:.80} to {last!r:.80} is not computed here; expected "
                         "numbers of layers")  # fmt: skip
    last = layers - 1 if last == -1 else last
    letters = "".join("e" if (i + 1) % every == 0 and first <= i <= last else "d" for i in range(layers))
    sparse = to_keys(letters, f"{FIRST}={first}, {LAST}={last} and {EVERY}={every}")
    return ERNIE_4_5.read(theirs) | read_balanced(theirs, NAMES, SHARED) | {"router": "softmax"} | sparse


def _find_layers(c: Config) -> dict[str, int]:
    """Returns their keys for the layers that have experts; none if these are not at equal distances."""
    sparse = [i for i, is_sparse in enumerate(c.mixture.sparse_layers) if is_sparse]
    for every in range(1, c.model.layers + 1):
        if sparse and sparse == [i for i in range(sparse[0], sparse[-1] + 1) if (i + 1) % every == 0]:
            return {FIRST: sparse[0], LAST: sparse[-1], EVERY: every}
    return {}


def _write(c: Config) -> dict[str, Any]:
    return ERNIE_4_5.write(c) | write_balanced(c, SHARED) | _find_layers(c)


def _layer(c: Config) -> list[Stored]:
    at, biases = "model.layers.{}.mlp", (Part("router_bias", show_as_row),)
    experts = [
        *list_experts(c, at, QWEN_NAMES),
        Stored(f"{at}.moe_statics.e_score_correction_bias", (1, c.experts.experts), biases),
        *list_shared(c, f"{at}.shared_experts"),
    ]
    return replace_dense(c, ERNIE_4_5.layer(c), experts)


def _find_variants(c: Config) -> dict[str, tuple | None]:
    layers: dict[str, tuple | None] = {"dense_first": None, "expert_pattern": None if _find_layers(c) else ()}
    return ERNIE_4_5.variants(c) | balanced_experts.find_variants(c) | {"router": ("softmax",)} | layers


ERNIE_4_5_MOE = dataclasses.replace(
    ERNIE_4_5,
    architecture="Ernie4_5_MoeForCausalLM",
    names=ERNIE_4_5.names | NAMES,
    defaults=ERNIE_4_5.defaults
    | {
        "hidden_size": 2560, "intermediate_size": 12_288, "num_hidden_layers": 28, "num_attention_heads": 20,
        "num_key_value_heads": 4, "head_dim": None, "moe_intermediate_size": 1536, "moe_k": 6, "moe_num_experts": 64,
        SHARED: 2, FIRST: 1, LAST: -1, EVERY: 1,
    },
    fixed=ERNIE_4_5.fixed | {"moe_norm_min": (1e-12,)},
    read=_read,
    write=_write,
    also=ERNIE_4_5.also,
    layer=_layer,
    aliases={"num_experts": "moe_num_experts", "num_experts_per_tok": "moe_k"},
    silent=(*balanced_experts.SILENT, "num_nextn_predict_layers"),
    harmless=("moe_capacity", "moe_gate", "moe_use_aux_free"),
    predicts_further=True,
    variants=_find_variants,
)  # fmt: skip
