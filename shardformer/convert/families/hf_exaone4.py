"""EXAONE 4: `Exaone4ForCausalLM`. Norms after each branch and of each head; layers without a window do not rotate."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, list_projections, read_settings, write_settings
from shardformer.convert.families.hf_olmo2 import OLMO_2
from shardformer.convert.families.hf_qwen3 import list_head_norms
from shardformer.convert.families.layer_types import FULL, SLIDING, list_types, read_layer_types, read_window, to_keys
from shardformer.convert.families.layout import Stored, norm
from shardformer.errors import UsageError

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 102_400, "intermediate_size": 16_384, "num_key_value_heads": 32, "rms_norm_eps": 1e-5,
    "sliding_window": 4096, "sliding_window_pattern": 4, "bos_token_id": 0,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    if theirs["sliding_window"] is None:  # then all layers rotate
        letters = read_layer_types(theirs, "f")
        if "w" in letters:
            raise UsageError(f"layer_types has {SLIDING}, which needs a sliding_window; expected a number of tokens")
        return read_settings(theirs) | to_keys(letters, 0)
    every = theirs["sliding_window_pattern"]
    if theirs.get("layer_types") is None and (type(every) is not int or every < 1):
        raise UsageError(f"sliding_window_pattern={every!r:.80} is not computed here; give layer_types")
    default = "f" if theirs.get("layer_types") else "w" * (every - 1) + "f"
    letters = read_layer_types(theirs, default).replace("f", "n")
    return read_settings(theirs) | to_keys(letters, read_window(theirs))


def _write(c: Config) -> dict:
    # Without a window, transformers would rotate all layers.
    window = c.model.window or (c.model.seq if any(c.model.layers_without_rotary) else None)
    return write_settings(c) | {"sliding_window": window, "layer_types": list_types(c, SLIDING, FULL)}


def _layer(c: Config) -> list[Stored]:
    at = "model.layers.{}"
    return [
        *list_projections(c),
        *list_head_norms(c),
        *norm(f"{at}.post_attention_layernorm", "post_attention_norm", c),
        *norm(f"{at}.post_feedforward_layernorm", "post_feed_forward_norm", c),
    ]


def _find_variants(c: Config) -> dict[str, tuple | None]:
    """Returns the values of our keys; a layer has a window or does not rotate, or all layers are full and rotate."""
    alternate = all(
        bool(window) != still
        for window, still in zip(c.model.layer_windows, c.model.layers_without_rotary, strict=True)
    )
    return LLAMA.variants(c) | ({"window": None, "window_pattern": None} if alternate else {})


EXAONE_4 = dataclasses.replace(
    OLMO_2,
    architecture="Exaone4ForCausalLM",
    defaults=DEFAULTS,
    fixed={},
    ours=OLMO_2.ours | {"qk_norm": "head"},
    read=_read,
    write=_write,
    also=(*LLAMA.also, "layer_types"),
    layer=_layer,
    variants=_find_variants,
)
