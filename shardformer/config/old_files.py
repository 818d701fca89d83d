"""Keys that a config.json of an earlier version may have: removed, renamed or with another value for None."""

from collections.abc import Callable
from typing import NamedTuple

from shardformer.errors import RunError


class RemovedKey(NamedTuple):
    """A key that earlier versions had."""

    does_nothing: Callable[[object, dict], object]  # of its value and all keys: whether today's run is the same
    now: str  # what holds instead; completes "KEY was removed: ..."


def _always(value, keys) -> bool:
    """Accepts any value: no result depends on the key, or `update_keys` has moved it to another."""
    return True


def _is_joined(embed: str) -> Callable[[object, dict], object]:
    """Returns the rule of a key that has become a value of `embed`."""
    return lambda value, keys: not value or keys.get("embed") == embed


REMOVED = {
    "ema_names": RemovedKey(lambda value, keys: value == "*" or not keys.get("ema"), "ema averages all parameters"),
    "skip_limit": RemovedKey(
        lambda value, keys: value == 5 or not keys.get("skip_steps"),
        "a run goes back to a checkpoint after 5 left-out steps in a row",
    ),
    "rollbacks": RemovedKey(
        lambda value, keys: value == 3 or not keys.get("skip_steps"), "a run goes back at most 3 times"
    ),
    "skip_window": RemovedKey(
        lambda value, keys: value == 128 or not keys.get("skip_steps"), "skip_steps compares with the last 128 steps"
    ),
    "t5_buckets": RemovedKey(
        lambda value, keys: value == 32 or keys.get("positions") != "t5", "positions=t5 has 32 buckets"
    ),
    "embed_split": RemovedKey(_always, "the token table is split over mp by the vocabulary"),
    "long_conversations": RemovedKey(_always, "long conversations end behind the last turn that fits in seq"),
    "json_as_text": RemovedKey(
        lambda value, keys: not value, "to learn the characters of JSON, make them the text of a record"
    ),
    "pack": RemovedKey(_always, "documents=packed fills rows across documents, documents=padded does not"),
    "mask_documents": RemovedKey(_always, "documents=masked ends attention and positions where a document ends"),
    "lora_rank_pattern": RemovedKey(_always, "lora_targets=q,v:4 gives a matrix another rank"),
    "lora_alpha_pattern": RemovedKey(_always, "lora_targets=q,v:4:32 gives a matrix another rank and alpha"),
    "norm_plus_one": RemovedKey(
        lambda value, keys: not value or keys.get("norm") == "rmsnorm_plus_one",
        "norm=rmsnorm_plus_one multiplies by 1 + scale",
    ),
    "embed_bias": RemovedKey(_is_joined("bias"), "embed=bias adds a bias to the token embeddings"),
    "embed_norm": RemovedKey(_is_joined("norm"), "embed=norm norms the token embeddings"),
    "from_step": RemovedKey(_always, "name the checkpoint: base=RUN/step_N"),
    "eval_include": RemovedKey(_always, "name your own tasks with their folder: eval_tasks=FOLDER/NAME"),
    "score_every": RemovedKey(_always, "scores and texts come with each evaluation, every eval_every steps"),
    "eval_tokens": RemovedKey(_always, "prompts are continued by 64 tokens"),
    "heartbeat": RemovedKey(_always, "a process that is silent for a fifth of start_timeout counts as dead"),
}


def drop_removed(keys: dict, path) -> dict:
    """Returns the keys of a config.json without removed ones; raises RunError if one had an effect.

    `path` is for the message.
    """
    for name in REMOVED.keys() & keys.keys():
        key = REMOVED[name]
        if not key.does_nothing(keys[name], keys):
            raise RunError(
                f"{path} has {name}={keys[name]}, and this key was removed: {key.now}. Use version 0.1.0 for this run"
            )
    return {name: value for name, value in keys.items() if name not in REMOVED}


# Earlier versions wrote 0 where None is now.
ZERO_FOR_NONE = (
    "kv_heads", "head_dim", "d_ff", "rotary_dims", "attention_scale", "attention_cap", "window",
    "window_rotary_theta", "logits_cap", "init_std", "loss_chunk", "decay_steps", "decay", "eval_batches",
)  # fmt: skip
RENAMED = {"windows": "order"}
REMAT = {True: "full", "true": "full", False: "none", "false": "none"}


def _join_documents(keys: dict) -> None:
    """Replaces the keys `pack` and `mask_documents` by `documents`."""
    if keys.get("pack") is False:
        keys["documents"] = "padded"
    elif keys.get("mask_documents"):
        keys["documents"] = "masked"


def _join_adapters(keys: dict) -> None:
    """Adds the numbers of `lora_rank_pattern` and `lora_alpha_pattern`, such as q=4,down=16, to the targets."""
    ranks, alphas = (_parse_pattern(keys.get(f"lora_{name}_pattern", "")) for name in ("rank", "alpha"))
    if not ranks and not alphas:
        return
    targets = []
    for matrix in keys["lora_targets"].split(","):
        rank = ranks.get(matrix, keys["lora_rank"])
        targets.append(f"{matrix}:{rank}:{alphas[matrix]}" if matrix in alphas else f"{matrix}:{rank}")
    keys["lora_targets"] = ",".join(targets)


def _parse_pattern(text: str) -> dict[str, str]:
    return {word.partition("=")[0].strip(): word.partition("=")[2] for word in text.split(",") if word}


def _join_embedding(keys: dict) -> None:
    """Replaces `embed_bias`, `embed_norm` and `norm_plus_one` by values of `embed` and `norm`."""
    for value in ("bias", "norm"):
        if keys.get(f"embed_{value}"):
            keys.setdefault("embed", value)
    if keys.get("norm_plus_one") and keys.get("norm") == "rmsnorm":
        keys["norm"] = "rmsnorm_plus_one"


def update_keys(stored: dict, path) -> dict:
    """Returns the keys of a config.json under today's names and with today's values; `path` is for messages."""
    keys = {RENAMED.get(name, name): value for name, value in dict(stored).items()}
    _join_documents(keys)
    _join_adapters(keys)
    _join_embedding(keys)
    if keys.get("base") and keys.get("from_step"):
        keys["base"] += f"/step_{keys['from_step']:08d}"
    keys.setdefault("order", "random")  # runs from before the key existed read random windows
    keys |= {name: None for name in ZERO_FOR_NONE if keys.get(name) == 0 and not isinstance(keys[name], bool)}
    if isinstance(keys.get("embed_scale"), bool):  # before it was a factor
        keys["embed_scale"] = None if keys["embed_scale"] else 1.0
    if "remat" in keys:
        keys["remat"] = REMAT.get(keys["remat"], keys["remat"])
    return drop_removed(keys, path)
