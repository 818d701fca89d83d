"""Rewards of sampled answers: a function of the user's file, or one of two that are built in."""

import importlib.util
import math
from collections.abc import Callable
from pathlib import Path

from shardformer.config import Config
from shardformer.errors import RunError, UsageError, forbid_exit
from shardformer.files import expand_home

Reward = Callable[[str, str, str], float]
TAKES = "reward takes FILE.py:FUNCTION, match or length:N"


def match(prompt: str, answer: str, expected: str) -> float:
    """Returns 1 for the record's own answer, but for spaces around it; else 0."""
    return float(answer.strip() == expected.strip())


def check_reward(config: Config) -> None:
    """Raises UsageError for a reward that is missing or cannot be imported, before a run starts."""
    if config.preferences.learns_rewards:
        open_reward(config.start.reward)


def open_reward(name: str) -> Reward:
    """Returns the function that reward= names. Only a start names it: no stored file can have code run."""
    if not name:
        raise UsageError(f"objective=grpo learns from rewards, which each start names; {TAKES}")
    if name == "match":
        return match
    kind, _, value = name.rpartition(":")
    if kind == "length":
        if not (value.isascii() and value.isdigit() and int(value)):
            raise UsageError(f"reward=length:N takes a number of characters of at least 1, got {value!r:.40}")
        return _make_length_reward(int(value))
    if not kind.endswith(".py") or not value.isidentifier():
        raise UsageError(f"{TAKES}; got reward={name:.100}")
    function = _import_function(name, Path(expand_home(kind)), value)

    def reward(prompt: str, answer: str, expected: str) -> float:
        with forbid_exit(f"reward={name}"):
            return function(prompt, answer, expected)

    return reward


def _make_length_reward(wanted: int) -> Reward:
    def reward(prompt: str, answer: str, expected: str) -> float:
        return max(1 - abs(len(answer) - wanted) / wanted, 0.0)

    return reward


def _import_function(name: str, path: Path, function: str) -> Reward:
    if not path.is_file():
        raise UsageError(f"reward={name}: {path} is not a file; {TAKES}")
    try:
        spec = importlib.util.spec_from_file_location(path.stem, path)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        with forbid_exit("the file"):
            spec.loader.exec_module(module)
        result = getattr(module, function)
    except Exception as error:  # a file may raise anything
        raise UsageError(f"reward={name} cannot be imported: {str(error) or type(error).__name__}") from None
    if not callable(result):
        raise UsageError(f"reward={name} is a {type(result).__name__}; name a function")
    return result


def compute_reward(reward: Reward, prompt: str, answer: str, expected: str) -> float:
    """Returns the reward of an answer; raises RunError for a function that fails or gives no finite number."""
    try:
        value = float(reward(prompt, answer, expected))
    except Exception as error:  # a function may raise anything
        raise RunError(
            f"reward failed for the answer {answer!r:.80}: {type(error).__name__}: {error!s:.200}"
        ) from error
    if not math.isfinite(value):
        raise RunError(f"reward gave {value} for the answer {answer!r:.80}; expected a finite number")
    return value
