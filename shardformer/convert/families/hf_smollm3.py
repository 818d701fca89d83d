"""SmolLM3: `SmolLM3ForCausalLM`. Llama with some layers whose queries and keys do not rotate."""

import dataclasses

from shardformer.config import Config
from shardformer.convert.families.hf_llama import LLAMA, write_settings
from shardformer.convert.families.hf_qwen2 import NO_WINDOW, WITHOUT_WINDOW, read_without_windows
from shardformer.convert.families.layer_types import FULL, check_layers, to_keys
from shardformer.errors import UsageError

DEFAULTS = LLAMA.defaults | {
    "vocab_size": 128_256, "hidden_size": 2048, "num_hidden_layers": 36, "num_attention_heads": 16,
    "num_key_value_heads": 4, "max_position_embeddings": 32_768, "tie_word_embeddings": True, "rope_theta": 2e6,
    "no_rope_layer_interval": 4, "bos_token_id": 128_000, "eos_token_id": 128_001, "pad_token_id": 128_004,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    return read_without_windows(theirs) | to_keys(read_letters(theirs), 0)


def read_letters(theirs: dict) -> str:
    """Returns a letter for each layer: f, or n for a layer that does not rotate."""
    layers, rotating, every = check_layers(theirs), theirs.get("no_rope_layers"), theirs["no_rope_layer_interval"]
    if rotating is None:
        if type(every) is not int or every < 1:
            raise UsageError(f"no_rope_layer_interval={every!r:.80} is not computed here; expected a number of layers")
        return "".join("f" if (i + 1) % every else "n" for i in range(layers))
    if not isinstance(rotating, list) or len(rotating) < layers or not all(rotates in (0, 1) for rotates in rotating):
        raise UsageError(
            f"no_rope_layers={rotating!r:.80} is not computed here; expected {layers} numbers, each 1 (rotary "
            "positions) or 0 (none)"
        )
    return "".join("f" if rotates else "n" for rotates in rotating[:layers])


def _write(c: Config) -> dict:
    rotating = [int(not without) for without in c.model.layers_without_rotary]
    return write_settings(c) | {"no_rope_layers": rotating, "layer_types": [FULL] * c.model.layers}


def _find_variants(c: Config) -> dict[str, tuple | None]:
    return LLAMA.variants(c) | ({} if c.model.window else {"window_pattern": None})


SMOLLM_3 = dataclasses.replace(
    LLAMA,
    architecture="SmolLM3ForCausalLM",
    defaults=DEFAULTS,
    fixed=NO_WINDOW | {"attention_bias": (False,), "mlp_bias": (False,)},
    read=_read,
    write=_write,
    also=(*LLAMA.also, "layer_types", "no_rope_layers", "no_rope_layer_interval"),
    silent=("pretraining_tp", *WITHOUT_WINDOW),
    variants=_find_variants,
)
