"""GPT-Neo: `GPTNeoForCausalLM`. Every other layer of the released models attends within a window of 256 tokens."""

from shardformer.config import Config
from shardformer.convert.families.family import HIDDEN_NAMES, LAYERNORM, Family, read_activation
from shardformer.convert.families.hf_gpt2 import list_outside, write_activation
from shardformer.convert.families.layer_types import check_layers, list_types, read_window, shorten, to_keys
from shardformer.convert.families.layout import Stored, linear, norm, plain
from shardformer.errors import UsageError

DEFAULTS = {
    "vocab_size": 50257, "max_position_embeddings": 2048, "hidden_size": 2048, "num_layers": 24, "num_heads": 16,
    "attention_types": [[["global", "local"], 12]], "intermediate_size": None, "window_size": 256,
    "activation_function": "gelu_new", "layer_norm_epsilon": 1e-5, "tie_word_embeddings": True,
    "bos_token_id": 50256, "eos_token_id": 50256, "pad_token_id": None,
}  # fmt: skip


def _read(theirs: dict) -> dict:
    layers = expand_types(theirs)
    if theirs.get("attention_layers") not in (None, layers):
        raise UsageError("attention_layers contradicts attention_types, which transformers reads; remove it")
    if unknown := set(layers) - {"global", "local"}:
        raise UsageError(f"attention_types has {min(unknown)!r:.80}; there are global and local")
    letters = "".join("w" if kind == "local" else "f" for kind in layers)
    window = read_window(theirs, "window_size") if "local" in layers else 0
    return read_activation(theirs, "activation_function") | to_keys(letters, window)


def expand_types(theirs: dict) -> list[str]:
    """Returns the kind of each layer, of which there must be num_layers."""
    check_layers(theirs, "num_layers")
    layers: list[str] = []
    for types, count in theirs["attention_types"]:
        if len(types) * count > theirs["num_layers"]:
            break
        layers += [*types] * count
    else:
        if len(layers) == theirs["num_layers"]:
            return layers
    raise UsageError(
        f"attention_types={theirs['attention_types']!r:.80} does not name num_layers={theirs['num_layers']} layers"
    )


def _write(c: Config) -> dict:
    types, count = shorten(list_types(c, "local", "global"))
    return write_activation(c) | {"attention_types": [[types, count]], "window_size": c.model.window or c.model.seq}


def _layer(c: Config) -> list[Stored]:
    D, F, at = c.model.d_model, c.model.ff_size, "transformer.h.{}"
    return [
        *norm(f"{at}.ln_1", "attention_norm", c),
        *[linear(f"{at}.attn.attention.{name}_proj", name, D, D) for name in "qkv"],
        linear(f"{at}.attn.attention.out_proj", "o", D, D),
        plain(f"{at}.attn.attention.out_proj.bias", "o_bias", D),
        *norm(f"{at}.ln_2", "feed_forward_norm", c),
        linear(f"{at}.mlp.c_fc", "up", F, D),
        plain(f"{at}.mlp.c_fc.bias", "up_bias", F),
        linear(f"{at}.mlp.c_proj", "down", D, F),
        plain(f"{at}.mlp.c_proj.bias", "down_bias", D),
    ]


GPT_NEO = Family(
    architecture="GPTNeoForCausalLM",
    names=HIDDEN_NAMES | {"layers": "num_layers", "heads": "num_heads", "norm_eps": "layer_norm_epsilon"},
    defaults=DEFAULTS,
    # hf_gptj.py reads GPT-J as a fork of transformers had it: as a GPT-Neo with `rotary` and `jax`.
    fixed={"rotary": (False,), "rotary_dim": (None, 0)},
    ours=LAYERNORM
    | {
        "block": "sequential",
        "bias": "all_but_qkv",
        "positions": "learned",
        "head_bias": False,
        "attention_scale": 1.0,
    },
    read=_read,
    write=_write,
    also=("activation_function", "attention_types", "attention_layers", "window_size"),
    outside=list_outside,
    layer=_layer,
    dropouts=("attention_dropout", "embed_dropout", "resid_dropout"),
    aliases={"num_attention_heads": "num_heads", "num_hidden_layers": "num_layers"},
    variants=lambda c: {"window": None, "window_pattern": None},
)
