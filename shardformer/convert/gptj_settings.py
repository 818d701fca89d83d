"""GPT-J's JSON configuration and ours."""

import json
import math
from pathlib import Path

from shardformer.config import LAUNCH_ONLY_KEYS, Config
from shardformer.config.keys import require
from shardformer.config.presets import preset
from shardformer.errors import UsageError
from shardformer.files import read_text

NAME = "config.json"
SHARDS = "cores_per_replica"
POSITIONS = {"rotary": "rotary", "fixed": "learned", "t5": "t5", "none": "none"}
NORMS = {
    "layernorm-desync": "each shard has its own norm",
    "layernorm-nobias": "our norms have no offset only where the feed-forward has no bias either",
    "rmsnorm": "it adds its epsilon to the norm, ours to the mean square",
    "rmsnorm-bias": "it adds its epsilon to the norm, ours to the mean square",
    "scalenorm": "it has a single gain for all dimensions",
    "scalenorm-bias": "it has a single gain for all dimensions",
}
_NAMES = {
    "layers": "layers",
    "d_model": "d_model",
    "heads": "n_heads",
    "seq": "seq",
    "lr": "lr",
    "lr_min": "end_lr",
    "warmup": "warmup_steps",
    "weight_decay": "weight_decay",
    "steps": "total_steps",
}
_COUNTS = {
    "layers": 1,
    "d_model": 1,
    "n_heads": 1,
    "seq": 1,
    "n_vocab": 1,
    SHARDS: 1,
    "tpu_size": 1,
    "per_replica_batch": 1,
    "gradient_accumulation_steps": 1,
    "warmup_steps": 0,
    "anneal_steps": 0,
    "pe_rotary_dims": 0,
    "total_steps": 1,
}
_RATES = ("lr", "end_lr", "weight_decay")
_NEEDED = ("layers", "d_model", "n_heads", "n_vocab", "norm", "pe", "seq")
_OURS = "shardformer"  # the run's configuration: GPT-J's scripts ignore it, the conversion back reads it


def default_config() -> Config:
    """Returns GPT-J-6B's configuration, with the optimizer of GPT-J's code."""
    return preset("gptj_6b").replace(beta2=0.999, zero=0, remat="full")


def read_config(path: Path) -> tuple[Config, int | None]:
    """Returns the configuration of a JSON file, and the number of shards that it names."""
    theirs = _json(path)
    if missing := [name for name in _NEEDED if name not in theirs]:
        raise UsageError(f"{path} is not a configuration of GPT-J: it lacks {', '.join(missing)}")
    if theirs["norm"] != "layernorm":
        why = NORMS.get(str(theirs["norm"]), "GPT-J has no such norm")
        raise UsageError(f"{path}: norm {theirs['norm']!r} has no counterpart here: {why}; it runs under legacy")
    if str(theirs["pe"]) not in POSITIONS:
        raise UsageError(f"{path}: pe is one of {', '.join(POSITIONS)}; got {theirs['pe']!r}")
    for name, least in _COUNTS.items():
        if name in theirs and (type(theirs[name]) is not int or theirs[name] < least):
            raise UsageError(f"{path}: {name} is a whole number, at least {least}; got {theirs[name]!r}")
    for name in _RATES:
        if name in theirs and (type(theirs[name]) not in (int, float) or not 0 <= theirs[name] < math.inf):
            raise UsageError(f"{path}: {name} is a number, at least 0; got {theirs[name]!r}")
    if theirs.get("tpu_size", math.inf) < theirs.get(SHARDS, 1):
        raise UsageError(f"{path}: {SHARDS}={theirs[SHARDS]} is more than tpu_size={theirs['tpu_size']} cores")
    return _to_config(path, theirs), theirs.get(SHARDS)


def _to_config(path: Path, theirs: dict) -> Config:
    try:
        if _OURS not in theirs:
            return default_config().replace(**_values(theirs))
        ours = Config.of(**{name: value for name, value in dict(theirs[_OURS]).items() if name not in LAUNCH_ONLY_KEYS})
        require(ours.model.vocab > 0, "vocab must be at least 1 in a run")
        return ours
    except UsageError as error:
        raise UsageError(f"{path} must be corrected: {error}") from None
    except (TypeError, ValueError) as error:
        raise UsageError(f"{path}: {_OURS} is not a configuration of this version: {error}") from None


def _values(theirs: dict) -> dict:
    rotary = theirs["pe"] == "rotary"
    values = {ours: theirs[name] for ours, name in _NAMES.items() if name in theirs} | {
        "positions": POSITIONS[theirs["pe"]],
        "rotary_dims": theirs.get("pe_rotary_dims") or None if rotary else None,
        "vocab": theirs["n_vocab"],
        "vocab_multiple": math.gcd(theirs["n_vocab"], 8),
    }
    if {"anneal_steps", "warmup_steps"} <= theirs.keys():
        values["decay_steps"] = theirs["warmup_steps"] + theirs["anneal_steps"]
    if {"per_replica_batch", "tpu_size", SHARDS} <= theirs.keys():
        replicas = theirs["tpu_size"] // theirs[SHARDS]
        values["batch"] = theirs["per_replica_batch"] * replicas * theirs.get("gradient_accumulation_steps", 1)
    return values


def write_config(path: Path, config: Config, shards: int) -> None:
    """Writes the JSON that GPT-J's code reads, and the run's configuration for the conversion back."""
    names = {positions: pe for pe, positions in POSITIONS.items()}
    decay_steps = config.optimizer.decay_steps or config.training.steps
    theirs = {name: config.get(ours) for ours, name in _NAMES.items()} | {
        "n_vocab": config.model.padded_vocab,
        "norm": "layernorm",
        "pe": names[config.model.positions],
        "pe_rotary_dims": config.model.rotary_size,
        SHARDS: shards,
        "tpu_size": shards,
        "per_replica_batch": config.training.batch,
        "gradient_accumulation_steps": 1,
        "anneal_steps": max(decay_steps - config.optimizer.warmup, 0),
    }
    path.write_text(json.dumps(theirs | {_OURS: json.loads(config.to_json())}, indent=2) + "\n")


def _json(path: Path) -> dict:
    try:
        content = json.loads(read_text(path))
    except OSError as error:
        raise UsageError(f"config={path} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise UsageError(f"config={path} is not JSON: {error}") from None
    if not isinstance(content, dict):
        raise UsageError(f"config={path} is not a JSON object")
    return content
