"""Qwen3: `Qwen3ForCausalLM`. Llama with a norm of each head's queries and keys."""

from shardformer.config import Config
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_llama import LLAMA, list_layer
from shardformer.convert.families.hf_qwen2 import DEFAULTS, NO_WINDOW, WITHOUT_WINDOW, read_without_windows
from shardformer.convert.families.layout import Stored, half_split


def _layer(c: Config) -> list[Stored]:
    K, at = c.head_size, "model.layers.{}.self_attn"
    norms = [
        Stored(f"{at}.{name}_norm.weight", (K,), half_split(f"{name}_head_scale", c, 1), seen=(1, K)) for name in "qk"
    ]
    return [*list_layer(c), *norms]


QWEN_3 = Family(
    architecture="Qwen3ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS | {"head_dim": 128},
    fixed=NO_WINDOW | {"attention_bias": (False,)},
    ours=LLAMA.ours | {"qk_norm": "head"},
    read=read_without_windows,
    write=LLAMA.write,
    also=(*LLAMA.also, "layer_types"),
    outside=LLAMA.outside,
    layer=_layer,
    dropouts=LLAMA.dropouts,
    silent=WITHOUT_WINDOW,
    variants=LLAMA.variants,
)
