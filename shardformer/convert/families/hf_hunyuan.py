"""Hunyuan's dense models: `HunYuanDenseV1ForCausalLM`. Qwen3 with norms of heads after their rotation."""

import dataclasses
from typing import Any

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA
from shardformer.convert.families.hf_qwen3 import list_head_norms
from shardformer.convert.families.layout import Stored, rename
from shardformer.errors import UsageError

_NAMES = {r"q_norm\.": "query_layernorm.", r"k_norm\.": "key_layernorm."}


def _read(theirs: dict) -> dict[str, Any]:
    return LLAMA.read(_write_out_alpha(theirs))


def _write_out_alpha(theirs: dict) -> dict:
    """Returns their keys with the base of the frequencies that a fixed `alpha` of rope_type=dynamic stands for."""
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    alpha = rope.get("alpha")
    if not alpha or rope.get("rope_type", rope.get("type")) != "dynamic":
        return theirs
    if not isinstance(alpha, int | float) or alpha <= 0:
        raise UsageError(f"alpha={alpha!r:.80} of rope_type=dynamic is not computed here; expected a number above 0")
    size = theirs["head_dim"] or theirs["hidden_size"] // theirs["num_attention_heads"]
    theta = rope.get("rope_theta", theirs.get("rope_theta", 10_000))
    others = {key: value for key, value in theirs.items() if key != "rope_scaling"}
    return others | {"rope_parameters": {"rope_theta": theta * alpha ** (size / (size - 2))}}


def _layer(c: Config) -> list[Stored]:
    return [*LLAMA.layer(c), *rename(list_head_norms(c), _NAMES)]


HUNYUAN = dataclasses.replace(
    LLAMA,
    architecture="HunYuanDenseV1ForCausalLM",
    defaults=LLAMA.defaults | {"vocab_size": 290_943, "rms_norm_eps": 1e-5, "pad_token_id": 0},
    fixed={
        "attention_bias": (False,), "mlp_bias": (False,), "use_qk_norm": (True,), "use_cla": (False,),
        "use_rotary_pos_emb": (True,),
    },
    ours=LLAMA.ours | {"qk_norm": "rotated_head"},
    read=_read,
    layer=_layer,
    silent=(*LLAMA.silent, "eod_token_id"),
    harmless=(),
)  # fmt: skip
