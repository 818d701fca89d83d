"""The description of one Hugging Face `model_type`: its config.json, and the arrays that its weights are stored in."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from shardformer.config import Config
from shardformer.config.rotary_scaling import UNTRUNCATED
from shardformer.convert.families.layout import Stored
from shardformer.errors import UsageError

# The tanh form has two or more names in transformers, and so has the erf form.
ACTIVATIONS = {
    "gelu_new": "gelu", "gelu_fast": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_python_tanh": "gelu",
    "gelu_accurate": "gelu", "gelu": "gelu_exact", "gelu_python": "gelu_exact", "relu": "relu",
    "relu2": "relu2", "silu": "silu", "swish": "silu",
}  # fmt: skip
GATED_ACTIVATIONS = {"silu": "swiglu", "swish": "swiglu"}
TO_ACTIVATIONS = {"gelu": "gelu_new", "gelu_exact": "gelu", "relu": "relu", "relu2": "relu2", "silu": "silu"}

GPT_NAMES = {
    "layers": "n_layer", "d_model": "n_embd", "heads": "n_head", "seq": "n_positions", "d_ff": "n_inner",
    "vocab": "vocab_size", "norm_eps": "layer_norm_epsilon", "tied": "tie_word_embeddings",
}  # fmt: skip
# Names by which transformers accepts the same values.
GPT_ALIASES = {
    "hidden_size": "n_embd", "num_attention_heads": "n_head", "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}  # fmt: skip
HIDDEN_NAMES = {
    "layers": "num_hidden_layers", "d_model": "hidden_size", "heads": "num_attention_heads",
    "seq": "max_position_embeddings", "d_ff": "intermediate_size", "vocab": "vocab_size", "tied": "tie_word_embeddings",
}  # fmt: skip
LAYERNORM = {"norm": "layernorm", "embed": "plain"}


@dataclasses.dataclass(frozen=True)
class Family:
    """One `model_type`. Keys of config.json are called theirs, keys of a Config ours."""

    architecture: str
    names: dict[str, str]  # our key -> their key with the same value
    defaults: dict[str, Any]  # values of transformers' class for keys that config.json lacks, special ids included
    ours: dict[str, Any]  # values of our keys that every model of the family has
    read: Callable[[dict], dict]  # our remaining keys, from all of theirs
    write: Callable[[Config], dict]  # their remaining keys
    also: tuple[str, ...]  # their keys that `read` reads
    outside: Callable[[Config], list[Stored]]  # the arrays outside the layers
    layer: Callable[[Config], list[Stored]]  # the arrays of one layer, with {} for its number
    fixed: dict[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)  # their key -> accepted values
    dropouts: tuple[str, ...] = ()
    silent: tuple[str, ...] = ()  # keys of transformers' own class that do not change the logits
    harmless: tuple[str, ...] = ()  # keys of others that do not change the logits: each is reported in one line
    # True: the files may have layers beyond the last, which predict later tokens; they are not read.
    predicts_further: bool = False
    aliases: dict[str, str] = dataclasses.field(default_factory=dict)  # their second name -> their first name
    # Regular expressions for parts of array names -> their replacements in older files.
    older_arrays: dict[str, str] = dataclasses.field(default_factory=dict)
    # Our key -> the values that the family computes besides its default or the value of `ours`; None for any value.
    variants: Callable[[Config], dict[str, tuple | None]] = lambda config: {}


def read_activation(theirs: dict, key: str, known: dict[str, str] = ACTIVATIONS) -> dict:
    """Returns our key `activation` for their `key`."""
    if theirs[key] not in known:
        raise UsageError(
            f"{key}={theirs[key]!r:.80} is not an activation that we compute: there are {', '.join(known)}"
        )
    return {"activation": known[theirs[key]]}


def resolve_aliases(theirs: dict, aliases: dict[str, str]) -> dict:
    """Replaces second names of keys by their first names; rejects two names with two values."""
    given: dict[str, str] = {}  # first name -> its name in config.json
    for name in sorted(theirs, key=aliases.__contains__):  # first names before second names
        other = given.setdefault(aliases.get(name, name), name)
        if theirs[name] != theirs[other]:
            raise UsageError(
                f"{name}={theirs[name]!r:.80} contradicts {other}={theirs[other]!r:.80}; correct one of them"
            )
    return {key: theirs[name] for key, name in given.items()}


def reject_differences(theirs: dict, ruling: str, value: Any, rest: tuple[str, ...]) -> None:
    """Rejects keys that name the value of `ruling` a second time, if they have another value."""
    for other in rest:
        if theirs.get(other) is not None and theirs[other] != value:
            raise UsageError(
                f"{other}={theirs[other]!r:.80} contradicts {ruling}={value!r:.80}, which transformers reads; "
                f"correct {other} or remove it"
            )


# Rotary positions. transformers reads `rope_scaling`, or else `rope_parameters`, before any key outside of them.
ROPE_KEYS = ("rope_parameters", "rope_scaling", "rope_theta", "partial_rotary_factor")
_ROPE_NAMES = {"rope_theta", "partial_rotary_factor", "rope_type", "type"}
_ROPE_SWITCHES = {"yarn": ("truncate", "finetuned")}  # `finetuned`, of Yarn's own files, changes no frequency
_ROPE_NUMBERS = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "beta_slow", "beta_fast", "original_max_position_embeddings", "attention_factor"),
    "longrope": ("factor", "original_max_position_embeddings", "attention_factor", "short_factor", "long_factor"),
}


def find_rope(theirs: dict, of_yarn: tuple[str, ...] = ()) -> dict:
    """Returns the object of rotary settings that transformers reads; rejects one that it would not read fully.

    of_yarn: further names that a family reads of rope_type=yarn.
    """
    rope = theirs.get("rope_scaling") or theirs.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in _ROPE_NUMBERS:
        raise UsageError(
            f"rope_type={kind!r:.80} is not a scaling that we compute: there are {', '.join(_ROPE_NUMBERS)}"
        )
    known = {*_ROPE_NAMES, *_ROPE_NUMBERS[kind], *_ROPE_SWITCHES.get(kind, ()), *(of_yarn if kind == "yarn" else ())}
    for name, value in rope.items():
        if name not in known and value is not None:
            raise UsageError(
                f"{name}={value!r:.80} of rope_type={kind} is not known here, and may change the positions"
            )
    return rope


def read_scaling(rope: dict, seq: int) -> dict:
    """Returns our key `rotary_scaling`, or nothing without a scaling."""
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return {}
    if kind == "longrope":
        return {"rotary_scaling": _read_longrope(rope, seq)}
    values: dict[str, float] = {"original_max_position_embeddings": seq}  # transformers' defaults
    if kind == "yarn":
        factor = 0.1 * math.log(rope["factor"]) + 1 if rope["factor"] > 1 else 1.0
        values |= {"beta_slow": 1, "beta_fast": 32, "attention_factor": factor}
    values |= {name: value for name, value in rope.items() if value is not None}
    figures = [values[name] for name in _ROPE_NUMBERS[kind]]
    is_truncated = kind != "yarn" or rope.get("truncate", True)
    kind = kind if is_truncated else f"{kind}{UNTRUNCATED}"
    return {"rotary_scaling": f"{kind}:{','.join(map(_format_exactly, figures))}"}


def _read_longrope(rope: dict, seq: int) -> str:
    old_seq = rope.get("original_max_position_embeddings") or seq
    short, long = rope.get("short_factor"), rope.get("long_factor")
    if not (isinstance(short, list) and isinstance(long, list) and len(short) == len(long)):
        raise UsageError("rope_type=longrope needs short_factor and long_factor, two lists of as many numbers")
    factor = seq / old_seq if rope.get("factor") is None else rope["factor"]
    attention = rope.get("attention_factor")
    if attention is None:
        attention = math.sqrt(1 + math.log(factor) / math.log(old_seq)) if factor > 1 else 1.0
    figures = [old_seq, attention, *short, *long]
    return f"longrope:{','.join(map(_format_exactly, figures))}"


def read_partial_rotary(theirs: dict) -> dict:
    """Returns our keys of rotary positions in which the share `partial_rotary_factor` of each head rotates."""
    rope, size = find_rope(theirs), theirs.get("head_dim") or theirs["hidden_size"] // theirs["num_attention_heads"]
    share = rope.get("partial_rotary_factor", theirs["partial_rotary_factor"])
    dims = int(size * share)
    if dims < 1:
        raise UsageError(f"partial_rotary_factor={share!r:.80} rotates no dimension of heads of {size}")
    theta = rope.get("rope_theta", theirs.get("rope_theta", 10_000))
    rotary = {"rotary_dims": None if dims == size else dims, "rotary_theta": float(theta)}
    return rotary | read_scaling(rope, theirs["max_position_embeddings"])


def share_rotating(c: Config) -> float:
    """Returns the share of a head that rotates, so that transformers' int(head size * share) is the exact number."""
    share = c.model.rotary_size / c.model.head_size
    return share if int(c.model.head_size * share) == c.model.rotary_size else math.nextafter(share, 1)


def write_partial_rotary(c: Config) -> dict:
    """Returns their keys of rotary positions in heads of which a share rotates."""
    share = share_rotating(c)
    return {
        # Libraries of before `rope_parameters` read the older names.
        "rope_theta": c.model.rotary_theta,
        "partial_rotary_factor": share,
        "rope_parameters": write_rope(c) | {"partial_rotary_factor": share},
    }


def _format_exactly(number: float) -> str:
    """Formats a number as short as possible without rounding it."""
    short = f"{number:g}"
    return short if float(short) == number else repr(float(number))


def write_rope(c: Config) -> dict:
    scaling = c.model.parsed_scaling
    rope: dict[str, Any] = {"rope_theta": c.model.rotary_theta, "rope_type": scaling.kind if scaling else "default"}
    if scaling and scaling.kind != "longrope":
        rope["factor"] = scaling.factor
    if scaling and scaling.kind == "llama3":
        rope |= {"low_freq_factor": scaling.low, "high_freq_factor": scaling.high}
    if scaling and scaling.kind == "yarn":
        rope |= {"beta_slow": scaling.low, "beta_fast": scaling.high, "attention_factor": scaling.attention}
        rope |= {} if scaling.truncate else {"truncate": False}
    if scaling and scaling.kind == "longrope":
        factors = {"short_factor": list(scaling.short), "long_factor": list(scaling.long)}
        rope |= factors | {"attention_factor": scaling.attention}
    if scaling and scaling.kind != "linear":
        rope["original_max_position_embeddings"] = int(scaling.old_seq)
    return rope
