"""Qwen2 and Qwen2.5: `Qwen2ForCausalLM`. Llama with biases on queries, keys and values."""

from shardformer.config import Config
from shardformer.convert.families.family import Family
from shardformer.convert.families.hf_llama import LLAMA, list_layer, read_settings
from shardformer.convert.families.layer_types import SLIDING
from shardformer.convert.families.layout import Pairs, Stored, half_split, plain
from shardformer.errors import UsageError

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 151_936, "intermediate_size": 22_016, "num_key_value_heads": 32, "max_position_embeddings": 32_768,
    "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
NO_WINDOW: dict[str, tuple] = {"use_sliding_window": (False,)}
WITHOUT_WINDOW = ("sliding_window", "max_window_layers")  # keys that transformers reads only with use_sliding_window


def read_without_windows(theirs: dict) -> dict:
    """Returns our keys; rejects layers with a window."""
    if SLIDING in (theirs.get("layer_types") or ()):
        raise UsageError(f"layer_types has {SLIDING}, which is not computed without use_sliding_window; expected none")
    return read_settings(theirs)


def list_qkv_biases(c: Config, pairs: Pairs = half_split) -> list[Stored]:
    """Lists the biases of queries, keys and values in a layer."""
    G, K, at = c.model.key_value_heads, c.model.head_size, "model.layers.{}.self_attn"
    rotated = [
        Stored(f"{at}.{name}_proj.bias", (heads * K,), pairs(f"{name}_bias", c, heads), seen=(heads, K))
        for name, heads in (("q", c.model.heads), ("k", G))
    ]
    return [*rotated, plain(f"{at}.v_proj.bias", "v_bias", G * K)]


def _layer(c: Config) -> list[Stored]:
    return [*list_layer(c), *list_qkv_biases(c)]


QWEN_2 = Family(
    architecture="Qwen2ForCausalLM",
    names=LLAMA.names,
    defaults=DEFAULTS,
    fixed=NO_WINDOW,
    ours=LLAMA.ours | {"bias": "qkv"},
    read=read_without_windows,
    write=LLAMA.write,
    also=(*LLAMA.also, "layer_types"),
    outside=LLAMA.outside,
    layer=_layer,
    dropouts=LLAMA.dropouts,
    silent=WITHOUT_WINDOW,
    variants=LLAMA.variants,
)
