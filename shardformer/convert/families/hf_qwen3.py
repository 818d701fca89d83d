"""Qwen3: `Qwen3ForCausalLM`. Qwen2 with a norm of each head's queries and keys instead of biases."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.hf_qwen2 import QWEN_2
from shardformer.convert.families.layout import Stored, half_split


def list_head_norms(c: Config) -> list[Stored]:
    """Lists the norms of each head's queries and of its keys."""
    K, at = c.model.head_size, "model.layers.{}.self_attn"
    return [
        Stored(f"{at}.{name}_norm.weight", (K,), half_split(f"{name}_head_scale", c, 1), seen=(1, K)) for name in "qk"
    ]


def _layer(c: Config) -> list[Stored]:
    return [*list_layer(c), *list_head_norms(c)]


QWEN_3 = dataclasses.replace(
    QWEN_2,
    architecture="Qwen3ForCausalLM",
    defaults=QWEN_2.defaults | {"head_dim": 128},
    fixed=QWEN_2.fixed | {"attention_bias": (False,)},
    ours=LLAMA.ours | {"qk_norm": "head"},
    layer=_layer,
)
