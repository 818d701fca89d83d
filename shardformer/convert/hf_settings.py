"""Hugging Face's config.json and ours, family by family. What a model of ours cannot say is refused by name."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from shardformer.config import Config, is_hugging_face, parsing
from shardformer.errors import UsageError
from shardformer.storage import BucketPath, read_small

NAME = "config.json"
ACTIVATIONS = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu": "gelu_exact", "relu": "relu", "silu": "silu"}
TO_ACTIVATIONS = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu", "silu": "silu"}
# What says nothing about the numbers that a trained model computes.
SILENT = {
    "_name_or_path", "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "task_specific_params", "tokenizer_class",
    "gradient_checkpointing", "return_dict", "output_attentions", "output_hidden_states", "is_decoder",
    "is_encoder_decoder", "chunk_size_feed_forward", "id2label", "label2id", "problem_type", "classifier_dropout",
    "summary_activation", "summary_first_dropout", "summary_proj_to_labels", "summary_type", "summary_use_proj",
    "attn_pdrop", "embd_pdrop", "resid_pdrop", "attention_dropout", "hidden_dropout", "embed_dropout", "resid_dropout",
    "pretraining_tp", "n_ctx", "reorder_and_upcast_attn", "rotary", "scale_attn_weights_", "auto_map", "_commit_hash",
    "attn_implementation", "_attn_implementation_autoset", "gradient_checkpointing_", "intermediate_dropout",
}  # fmt: skip


class Family(NamedTuple):
    """How one `model_type` writes what a Config says."""

    architecture: str
    names: dict[str, str]  # our key -> theirs, where both have the same values
    fixed: dict[str, tuple[Any, ...]]  # their key -> the values that we can compute, the default first
    ours: dict[str, Any]  # what every model of the family has
    read: Callable[[dict, dict], dict] = lambda theirs, ours: {}  # what else, from all of their keys
    write: Callable[[Config], dict] = lambda config: {}
    also: tuple[str, ...] = ()  # their keys that `read` looks at


def _activation(key: str, gated: bool = False):
    def read(theirs: dict) -> dict:
        name = theirs.get(key, "silu" if gated else "gelu_new")
        known = {"silu": "swiglu", "swish": "swiglu"} if gated else ACTIVATIONS
        if name not in known:
            raise UsageError(f"{key}={name!r} is not an activation that we compute: there are {', '.join(known)}")
        return {"activation": known[name]}

    return read


def _read_gpt(theirs: dict, names: dict) -> dict:
    return _activation("activation_function")(theirs)


def _read_gpt_neo(theirs: dict, names: dict) -> dict:
    kinds = theirs.get("attention_layers")
    if kinds is None:
        types = theirs.get("attention_types", [[["global", "local"], 12]])
        kinds = {kind for pattern, count in types if count > 0 for kind in pattern}
    seq, window = theirs["max_position_embeddings"], theirs.get("window_size", 256)
    if "local" in kinds and window < seq:
        raise UsageError(
            f"window_size={window} is less than max_position_embeddings={seq}, and attention_layers has local ones: "
            "attention within a window is not computed here"
        )
    return _activation("activation_function")(theirs)


def _read_neox(theirs: dict, names: dict) -> dict:
    rope = _rope(theirs)
    K = theirs["hidden_size"] // theirs["num_attention_heads"]
    share = theirs.get("rotary_pct", rope.get("partial_rotary_factor", 0.25))
    theta = theirs.get("rotary_emb_base", rope.get("rope_theta", 10_000))
    block = "parallel_two_norms" if theirs.get("use_parallel_residual", True) else "sequential"
    activation = _activation("hidden_act")({"hidden_act": "gelu"} | theirs)
    return activation | {"rotary_dims": int(K * share), "rotary_theta": float(theta), "block": block} | _scaling(rope)


def _read_llama(theirs: dict, names: dict) -> dict:
    rope, K = _rope(theirs), theirs["hidden_size"] // theirs["num_attention_heads"]
    if (theirs.get("head_dim") or K) != K:
        raise UsageError(f"head_dim={theirs['head_dim']} is not hidden_size / num_attention_heads = {K}")
    theta = theirs.get("rope_theta", rope.get("rope_theta", 10_000))
    heads = {"kv_heads": theirs.get("num_key_value_heads") or theirs["num_attention_heads"]}
    return _activation("hidden_act", gated=True)(theirs) | heads | {"rotary_theta": float(theta)} | _scaling(rope)


def _rope(theirs: dict) -> dict:
    return theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}


def _format_exactly(number: float) -> str:
    """As short as it can be without becoming another number."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def _scaling(rope: dict) -> dict:
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind == "linear":
        return {"rotary_scaling": f"linear:{_format_exactly(rope['factor'])}"}
    if kind == "llama3":
        numbers = [
            rope[n] for n in ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")
        ]
        return {"rotary_scaling": "llama3:" + ",".join(map(_format_exactly, numbers))}
    raise UsageError(f"rope_type={kind!r} is not a scaling that we compute: there are default, linear and llama3")


def _write_rope(c: Config) -> dict:
    scaling = parsing.parse_rotary_scaling(c.rotary_scaling)
    rope = {"rope_theta": c.rotary_theta, "rope_type": scaling.kind if scaling else "default"}
    if scaling:
        rope["factor"] = scaling.factor
    if scaling and scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
        rope["original_max_position_embeddings"] = int(scaling.old_seq)
    return rope


def _write_neox(c: Config) -> dict:
    rope = _write_rope(c) | {"partial_rotary_factor": c.rotary_size / c.head_size}
    parallel = c.block == "parallel_two_norms"
    # The older names too: libraries of their time read no other.
    older = {"rotary_pct": c.rotary_size / c.head_size, "rotary_emb_base": c.rotary_theta}
    return older | {
        "rope_parameters": rope,
        "use_parallel_residual": parallel,
        "hidden_act": TO_ACTIVATIONS[c.activation],
    }


def _write_llama(c: Config) -> dict:
    older = {"rope_theta": c.rotary_theta} | ({"rope_scaling": _write_rope(c)} if c.rotary_scaling else {})
    return older | {
        "num_key_value_heads": c.key_value_heads, "head_dim": c.head_size, "hidden_act": "silu",
        "rope_parameters": _write_rope(c),
    }  # fmt: skip


def _write_gpt(c: Config) -> dict:
    return {"activation_function": TO_ACTIVATIONS[c.activation]}


GPT_NAMES = {
    "layers": "n_layer", "d_model": "n_embd", "heads": "n_head", "seq": "n_positions", "d_ff": "n_inner",
    "vocab": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
}  # fmt: skip
HIDDEN_NAMES = {
    "layers": "num_hidden_layers", "d_model": "hidden_size", "heads": "num_attention_heads",
    "seq": "max_position_embeddings", "d_ff": "intermediate_size", "vocab": "vocab_size", "tied": "tie_word_embeddings",
}  # fmt: skip
LAYERNORM = {"norm": "layernorm", "embed_bias": False}

FAMILIES = {
    "gptj": Family(
        "GPTJForCausalLM", GPT_NAMES | {"rotary_dims": "rotary_dim"}, {"tie_word_embeddings": (False,)},
        LAYERNORM | {"block": "parallel", "bias": "ff", "positions": "rotary"},
        _read_gpt, _write_gpt, ("activation_function",),
    ),
    "gpt2": Family(
        "GPT2LMHeadModel", GPT_NAMES,
        {"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
        LAYERNORM | {"block": "sequential", "bias": "all", "positions": "learned", "head_bias": False},
        _read_gpt, _write_gpt, ("activation_function",),
    ),
    "gpt_neo": Family(
        "GPTNeoForCausalLM",
        HIDDEN_NAMES | {"layers": "num_layers", "heads": "num_heads", "norm_eps": "layer_norm_epsilon"}, {},
        LAYERNORM | {"block": "sequential", "bias": "all_but_qkv", "positions": "learned", "head_bias": False,
                     "attention_scale": 1.0},
        _read_gpt_neo,
        lambda c: _write_gpt(c) | {"attention_types": [[["global"], c.layers]]},
        ("activation_function", "attention_types", "attention_layers", "window_size"),
    ),
    "gpt_neox": Family(
        "GPTNeoXForCausalLM", HIDDEN_NAMES | {"norm_eps": "layer_norm_eps"}, {"attention_bias": (True,)},
        LAYERNORM | {"bias": "all", "positions": "rotary", "head_bias": False}, _read_neox, _write_neox,
        ("hidden_act", "rotary_pct", "rotary_emb_base", "rope_parameters", "rope_scaling", "use_parallel_residual"),
    ),
    "llama": Family(
        "LlamaForCausalLM", HIDDEN_NAMES | {"norm_eps": "rms_norm_eps"},
        {"attention_bias": (False,), "mlp_bias": (False,)},
        {"norm": "rmsnorm", "embed_bias": False, "block": "sequential", "bias": "none", "positions": "rotary"},
        _read_llama, _write_llama,
        ("hidden_act", "num_key_value_heads", "head_dim", "rope_theta", "rope_scaling", "rope_parameters"),
    ),
}  # fmt: skip
DEFAULTS = {
    "gptj": {"tie_word_embeddings": False, "n_inner": None, "layer_norm_epsilon": 1e-5},
    "gpt2": {"tie_word_embeddings": True, "n_inner": None, "layer_norm_epsilon": 1e-5},
    "gpt_neo": {"tie_word_embeddings": True, "intermediate_size": None, "layer_norm_epsilon": 1e-5},
    "gpt_neox": {"tie_word_embeddings": False, "layer_norm_eps": 1e-5},
    "llama": {"tie_word_embeddings": False, "rms_norm_eps": 1e-6},
}


def is_hf_folder(folder: Path | BucketPath) -> bool:
    try:
        return is_hugging_face(read_small(folder / NAME))
    except OSError:
        return False


def read_config(folder: Path | BucketPath) -> tuple[str, Config]:
    """The family of a folder's model, and the model as a Config."""
    path = folder / NAME
    theirs = json.loads(read_small(path))
    family_name = theirs["model_type"]
    if not isinstance(family_name, str) or family_name not in FAMILIES:
        raise UsageError(f"{path}: model_type={family_name!r:.80} is not known; there are {', '.join(FAMILIES)}")
    try:
        return family_name, _to_config(family_name, theirs)
    except UsageError as error:
        raise UsageError(f"{path}: {error}") from None
    except (KeyError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise UsageError(f"{path} is damaged: {type(error).__name__}: {error!s:.100}") from None


def _to_config(name: str, theirs: dict) -> Config:
    family, theirs = FAMILIES[name], DEFAULTS[name] | theirs
    if missing := [key for key in family.names.values() if key not in theirs]:
        raise UsageError(f"it lacks {', '.join(missing)}")
    known = {*family.names.values(), *family.fixed, *family.also, *SILENT}
    for key, value in theirs.items():
        if key not in known and value not in (None, False):
            raise UsageError(f"{key}={value!r:.80} is not known here, and may change what the model computes")
    for key, values in family.fixed.items():
        if theirs.get(key, values[0]) not in values:
            raise UsageError(f"{key}={theirs[key]!r:.80} is not computed here; expected {values[0]!r}")
    values = {ours: theirs[key] for ours, key in family.names.items()}
    if not values["vocab"]:
        raise UsageError(f"{family.names['vocab']}={values['vocab']!r}: the number of tokens is missing")
    if "d_ff" in values:
        values["d_ff"] = values["d_ff"] or 0
    if "rotary_dims" in values and not values["rotary_dims"]:
        raise UsageError(f"rotary_dim={values['rotary_dims']!r}: the number of dimensions that rotate is missing")
    return Config(**family.ours | values | family.read(theirs, values) | {"vocab_multiple": 8})


def write_config(folder: Path, name: str, config: Config, dtype: str) -> None:
    family = FAMILIES[name]
    theirs = {"architectures": [family.architecture], "model_type": name, "dtype": dtype, "torch_dtype": dtype}
    theirs |= {key: values[0] for key, values in family.fixed.items()}
    theirs |= {key: getattr(config, ours) for ours, key in family.names.items()} | family.write(config)
    theirs[family.names["d_ff"]] = config.ff_size
    if "rotary_dims" in family.names:
        theirs[family.names["rotary_dims"]] = config.rotary_size
    (folder / NAME).write_text(json.dumps(theirs, indent=2) + "\n")


def choose_family(config: Config) -> str:
    """The family that computes what this model computes; what none has is named, by the family that is closest."""
    problems = {name: _differences(name, config) for name in FAMILIES}
    closest = min(problems, key=lambda name: len(problems[name]))
    if problems[closest]:
        raise UsageError(
            f"no Hugging Face family has {' '.join(problems[closest])}; the closest, {closest}, differs there"
        )
    return closest


def _differences(name: str, c: Config) -> list[str]:
    """Which of our keys have values that a family does not know."""
    wanted: dict[str, tuple] = {key: (value,) for key, value in FAMILIES[name].ours.items()}
    silent = ("head_bias",) if c.tied or c.bias == "none" else ()
    wanted |= {"lora_rank": (0,), "kv_heads": (None, c.heads), "attention_scale": (None,), "rotary_scaling": ("",)}
    wanted["activation"] = tuple(TO_ACTIVATIONS)
    wanted["attention_scale"] = (FAMILIES[name].ours.get("attention_scale"),)
    if name == "gptj":
        wanted |= {"tied": (False,), "rotary_theta": (10_000.0,), "head_bias": (True,)}
    if name == "gpt_neox":
        wanted |= {"block": ("parallel_two_norms", "sequential")}
        del wanted["rotary_scaling"]
    if name == "llama":
        wanted["activation"] = ("swiglu",)
        del wanted["rotary_scaling"], wanted["kv_heads"]
    return [
        f"{key}={getattr(c, key)}"
        for key, values in wanted.items()
        if key not in silent and getattr(c, key) not in values
    ]
