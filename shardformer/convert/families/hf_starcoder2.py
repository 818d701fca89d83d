"""StarCoder 2: `Starcoder2ForCausalLM`. Layer norms, grouped and windowed attention, biases, a feed-forward of gelu."""

from shardformer.config import Config
from shardformer.convert.families.family import (
    HIDDEN_NAMES,
    LAYERNORM,
    ROPE_KEYS,
    TO_ACTIVATIONS,
    Family,
    read_activation,
)
from shardformer.convert.families.hf_llama import list_outside, read_rotary, write_rotary
from shardformer.convert.families.hf_qwen2 import list_qkv_biases
from shardformer.convert.families.layer_types import check_layers, read_window
from shardformer.convert.families.layout import Stored, half_split, linear, norm, plain

DEFAULTS = {
    "vocab_size": 49_152, "hidden_size": 3072, "intermediate_size": 12_288, "num_hidden_layers": 30,
    "num_attention_heads": 24, "num_key_value_heads": 2, "hidden_act": "gelu_pytorch_tanh",
    "max_position_embeddings": 4096, "norm_epsilon": 1e-5, "sliding_window": None, "use_bias": True,
    "tie_word_embeddings": True, "bos_token_id": 50_256, "eos_token_id": 50_256, "pad_token_id": None,
}  # fmt: skip
_TO_ACTIVATIONS = TO_ACTIVATIONS | {"gelu": "gelu_pytorch_tanh"}


def _read(theirs: dict) -> dict:
    result = read_activation(theirs, "hidden_act") | read_rotary(theirs)
    result |= {"kv_heads": theirs["num_key_value_heads"], "bias": "all" if theirs["use_bias"] else "norm"}
    if theirs["sliding_window"] is None:
        return result
    check_layers(theirs)
    return result | {"window": read_window(theirs)}


def _write(c: Config) -> dict:
    return write_rotary(c) | {
        "num_key_value_heads": c.model.key_value_heads,
        "hidden_act": _TO_ACTIVATIONS[c.model.activation],
        "sliding_window": c.model.window,
        "use_bias": c.model.bias == "all",
    }


def list_biased_layer(c: Config, up: str = "c_fc", down: str = "c_proj") -> list[Stored]:
    """Lists the arrays of a layer with a bias on each matrix if bias=all; `up` and `down` are theirs."""
    D, F, H, K, at = c.model.d_model, c.model.ff_size, c.model.heads, c.model.head_size, "model.layers.{}"
    result = [
        *norm(f"{at}.input_layernorm", "attention_norm", c),
        *norm(f"{at}.post_attention_layernorm", "feed_forward_norm", c),
    ]
    for name, heads in (("q", H), ("k", c.model.key_value_heads)):
        parts = half_split(name, c, heads)
        result.append(Stored(f"{at}.self_attn.{name}_proj.weight", (heads * K, D), parts, seen=(heads, K, D)))
    result.append(linear(f"{at}.self_attn.v_proj", "v", c.model.key_value_heads * K, D))
    result += list_qkv_biases(c) if c.model.bias == "all" else []
    for theirs, ours, outputs, inputs in (
        ("self_attn.o_proj", "o", D, H * K),
        (f"mlp.{up}", "up", F, D),
        (f"mlp.{down}", "down", D, F),
    ):
        result.append(linear(f"{at}.{theirs}", ours, outputs, inputs))
        if c.model.bias == "all":
            result.append(plain(f"{at}.{theirs}.bias", f"{ours}_bias", outputs))
    return result


STARCODER_2 = Family(
    architecture="Starcoder2ForCausalLM",
    names=HIDDEN_NAMES | {"norm_eps": "norm_epsilon"},
    defaults=DEFAULTS,
    ours=LAYERNORM | {"block": "sequential", "head_bias": False, "positions": "rotary"},
    read=_read,
    write=_write,
    also=("hidden_act", "num_key_value_heads", "use_bias", "sliding_window", *ROPE_KEYS),
    outside=list_outside,
    layer=list_biased_layer,
    dropouts=("attention_dropout", "residual_dropout", "embedding_dropout"),
    # Keys of the first files, which transformers does not read.
    harmless=(
        "activation_function", "attention_softmax_in_fp32", "scale_attention_softmax_in_fp32", "scale_attn_weights",
        "layer_norm_epsilon", "norm_type", "mlp_type", "rms_norm_eps", "attention_type", "attn_pdrop", "embd_pdrop",
        "resid_pdrop",
    ),
    variants=lambda c: {
        "bias": ("all", "norm"),
        "rotary_dims": (None, c.model.head_size),
        "rotary_scaling": None,
        "rotary_theta": None,
        "kv_heads": None,
        "window": None,
    },
)  # fmt: skip
