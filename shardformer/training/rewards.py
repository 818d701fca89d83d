"""Rewards of sampled answers: a function of the user's file, or one of two that are built in."""

import inspect
import math
from collections.abc import Callable

from shardformer.config.registries import names_code
from shardformer.errors import RunError, UsageError, forbid_exit
from shardformer.user_code import import_function

Reward = Callable[[str, str, str], float]
TAKES = "reward takes FILE.py:FUNCTION, match or length:N"


def match(prompt: str, answer: str, expected: str) -> float:
    """Returns 1 for the record's own answer, but for spaces around it; else 0."""
    return float(answer.strip() == expected.strip())


def open_reward(name: str) -> Reward:
    """Returns the function that reward= names."""
    if not name:
        raise UsageError(f"objective=grpo learns from rewards, which each start names; {TAKES}")
    if name == "match":
        return match
    kind, _, value = name.rpartition(":")
    if kind == "length":
        if not (value.isascii() and value.isdigit() and int(value)):
            raise UsageError(f"reward=length:N takes a number of characters of at least 1, got {value!r:.40}")
        return _make_length_reward(int(value))
    if not names_code(name):
        raise UsageError(f"{TAKES}; got reward={name:.100}")
    function = import_function("reward", name, TAKES)
    _check_parameters(name, function)

    def reward(prompt: str, answer: str, expected: str) -> float:
        with forbid_exit(f"reward={name}"):
            return function(prompt, answer, expected)

    return reward


def _make_length_reward(wanted: int) -> Reward:
    def reward(prompt: str, answer: str, expected: str) -> float:
        return max(1 - abs(len(answer) - wanted) / wanted, 0.0)

    return reward


def _check_parameters(name: str, function: Reward) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # some callables of C have none; the first call shows it
        return
    try:
        signature.bind("prompt", "answer", "expected")
    except TypeError:
        raise UsageError(
            f"reward={name} has the parameters {signature}, and is called with three texts; write "
            "(prompt, answer, expected)"
        ) from None


def try_reward(name: str, prompt: str, expected: str) -> None:
    """Raises UsageError unless a reward gives a number for a record's own answer, before a run starts."""
    try:
        compute_reward(open_reward(name), prompt, expected, expected)
    except RunError as error:
        raise UsageError(f"reward={name}, called with the first record's own answer: {error}") from None


def compute_reward(reward: Reward, prompt: str, answer: str, expected: str) -> float:
    """Returns the reward of an answer; raises RunError for a function that fails or gives no finite number."""
    try:
        value = reward(prompt, answer, expected)
    except Exception as error:  # a function may raise anything
        raise RunError(
            f"reward failed for the answer {answer!r:.80}: {type(error).__name__}: {error!s:.200}"
        ) from error
    try:
        number = float(value)
    except Exception:  # of an array's own conversion, perhaps
        number = math.nan
    if not math.isfinite(number):
        raise RunError(f"reward gave {value!r:.80} for the answer {answer!r:.80}; expected a finite number")
    return number
