"""EXAONE-MoE (K-EXAONE): `ExaoneMoeForCausalLM`. EXAONE 4's attention with norms before the branches, and experts."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families import balanced_experts
from shardformer.convert.families.balanced_experts import list_balanced, read_balanced, write_balanced
from shardformer.convert.families.expert_arrays import replace_dense, to_keys
from shardformer.convert.families.hf_exaone4 import EXAONE_4
from shardformer.convert.families.hf_qwen3 import QWEN_3
from shardformer.convert.families.layer_types import check_layers
from shardformer.convert.families.layout import Stored
from shardformer.errors import UsageError

NAMES = balanced_experts.NAMES | {"experts": "num_experts"}
SHARED, TYPES = "num_shared_experts", "mlp_layer_types"


def read_mlp_types(theirs: dict, dense_first: int) -> dict[str, Any]:
    """Returns our keys for the layers without experts: those that `mlp_layer_types` names, else the first ones."""
    layers, types = check_layers(theirs), theirs.get(TYPES)
    if types is None:
        types = ["dense" if i < dense_first else "sparse" for i in range(layers)]
    letters = {"dense": "d", "sparse": "e"}
    if not isinstance(types, list) or len(types) != layers or not all(kind in letters for kind in types):
        raise UsageError(f"{TYPES}={types!r:.80} is not computed here; expected {layers} names, each dense or sparse")
    return to_keys("".join(letters[kind] for kind in types), f"{TYPES}={types!r:.80}")


def write_mlp_types(c: Config) -> list[str]:
    return ["sparse" if is_sparse else "dense" for is_sparse in c.mixture.sparse_layers]


def _read(theirs: dict) -> dict[str, Any]:
    if theirs["sliding_window"] is None:
        raise UsageError("sliding_window=None is not computed here; expected a number of tokens")
    result = EXAONE_4.read(theirs) | read_balanced(theirs, NAMES, SHARED)
    return result | read_mlp_types(theirs, theirs["first_k_dense_replace"])


def _write(c: Config) -> dict[str, Any]:
    types = write_mlp_types(c)
    first = types.index("sparse")
    return EXAONE_4.write(c) | write_balanced(c, SHARED) | {TYPES: types, "first_k_dense_replace": first}


def _layer(c: Config) -> list[Stored]:
    return replace_dense(c, QWEN_3.layer(c), list_balanced(c, "model.layers.{}.mlp", "e_score_correction_bias"))


def _find_variants(c: Config) -> dict[str, tuple | None]:
    result = EXAONE_4.variants(c) | balanced_experts.find_variants(c) | {"expert_pattern": None}
    # Without layers that have a window, transformers rotates none.
    rotates = not c.model.window and not any(c.model.layers_without_rotary)
    return result | ({"window_pattern": ("n",)} if rotates else {})


EXAONE_MOE = dataclasses.replace(
    EXAONE_4,
    architecture="ExaoneMoeForCausalLM",
    names=EXAONE_4.names | NAMES,
    defaults=EXAONE_4.defaults
    | {
        "first_k_dense_replace": 1, "moe_intermediate_size": 1024, "num_experts": 64, "num_experts_per_tok": 8,
        SHARED: 1, "norm_topk_prob": True, "routed_scaling_factor": 2.5, "bos_token_id": 1, "eos_token_id": 53,
        "pad_token_id": 0,
    },
    fixed=balanced_experts.ONE_GROUP,
    ours=EXAONE_4.ours | {"block": "sequential"},
    read=_read,
    write=_write,
    also=(*EXAONE_4.also, TYPES),
    layer=_layer,
    aliases={"num_local_experts": "num_experts"},
    silent=balanced_experts.SILENT,
    variants=_find_variants,
)  # fmt: skip
