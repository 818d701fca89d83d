"""Keys that a config.json of an earlier version may have: removed, renamed or with another value for None."""

from collections.abc import Callable
from typing import NamedTuple

from shardformer.errors import RunError


class RemovedKey(NamedTuple):
    """A key that earlier versions had."""

    does_nothing: Callable[[object, dict], object]  # of its value and all keys: whether today's run is the same
    now: str  # what holds instead; completes "KEY was removed: ..."


REMOVED = {
    "ema_names": RemovedKey(lambda value, keys: value == "*" or not keys.get("ema"), "ema averages all parameters"),
    "skip_limit": RemovedKey(
        lambda value, keys: value == 5 or not keys.get("skip_steps"),
        "a run goes back to a checkpoint after 5 left-out steps in a row",
    ),
    "rollbacks": RemovedKey(
        lambda value, keys: value == 3 or not keys.get("skip_steps"), "a run goes back at most 3 times"
    ),
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


def update_keys(stored: dict, path) -> dict:
    """Returns the keys of a config.json under today's names and with today's values; `path` is for messages."""
    keys = {RENAMED.get(name, name): value for name, value in dict(stored).items()}
    keys.setdefault("order", "random")  # runs from before the key existed read random windows
    keys |= {name: None for name in ZERO_FOR_NONE if keys.get(name) == 0 and not isinstance(keys[name], bool)}
    if isinstance(keys.get("embed_scale"), bool):  # before it was a factor
        keys["embed_scale"] = None if keys["embed_scale"] else 1.0
    if "remat" in keys:
        keys["remat"] = REMAT.get(keys["remat"], keys["remat"])
    return drop_removed(keys, path)
