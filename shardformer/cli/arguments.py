"""Functions of all commands: a preset or a run folder from the arguments, and printing on the first process."""

import shutil
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TypeVar

from shardformer import storage
from shardformer.config import FIELDS, Config, format_value, parsing, presets
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.messages import is_first_process
from shardformer.storage import BucketPath
from shardformer.tables import escape_controls, format_blocks, format_table

T = TypeVar("T")
TASK_OUT = "checkpoints/task"


def parse_preset(arguments: list[str]) -> Config:
    """Returns the config of 'PRESET key=value ...', 'depth=N key=value ...' or 'task=FILE.py:NAME key=value ...'."""
    if not arguments:
        raise UsageError(f"name a preset: {', '.join(presets.PRESETS)}; or give depth=N")
    if any(word.startswith("task=") for word in arguments):
        if arguments[0] in presets.PRESETS:
            raise UsageError(f"{arguments[0]} is a language model, which a task replaces; leave it out")
        overrides = parse_keys(arguments)
        return Config.of(task=overrides["task"]).override(overrides | {"out": overrides.get("out") or TASK_OUT})
    if names_depth(arguments):
        from shardformer.config.depth import at_depth  # not imported with a preset

        return at_depth(*parse_depth(arguments))
    if arguments[0] not in presets.PRESETS and (storage.location(arguments[0]) / "config.json").is_file():
        raise UsageError(f"{arguments[0]} is a run; to continue it: train --resume {arguments[0]}")
    if "/" in arguments[0].partition("=")[0]:
        raise UsageError(
            f"{arguments[0]} is neither the folder of a run nor a preset; the presets are {', '.join(presets.PRESETS)}"
        )
    settings = presets.preset(arguments[0])
    overrides = parse_keys(arguments[1:])
    return settings.override(overrides | {"out": overrides.get("out") or settings.run.out})


def names_depth(arguments: list[str]) -> bool:
    return any(word.partition("=")[0] == "depth" for word in arguments)


def parse_depth(arguments: list[str]) -> tuple[int, dict]:
    """Returns the number and the keys of 'depth=N key=value ...'."""
    from shardformer.config.depth import DepthKeys

    if arguments[0] in presets.PRESETS:
        raise UsageError(f"{arguments[0]} and depth=N both choose the sizes; leave one of them out")
    options, rest = parsing.parse_known_options(arguments, DepthKeys)
    return options.depth, parse_keys(rest)


def describe_depth(arguments: list[str]) -> str:
    """Returns a table of what `depth=N` chooses, with reasons."""
    from shardformer.config.depth import choose_by_depth

    choices = choose_by_depth(*parse_depth(arguments))
    rows = [[f"{choice.key}={format_value(FIELDS[choice.key], choice.value)}", choice.reason] for choice in choices]
    return format_table(rows, ["depth chooses", "because"])


def check_preset(arguments: list[str]) -> None:
    """Rejects wrong words of 'PRESET key=value ...'; whatever else `train` takes, it checks itself."""
    if not any(word.startswith(("--resume", "base=")) for word in arguments):
        parse_preset(arguments)


def check_keys(arguments: list[str], options: Iterable[type]) -> None:
    """Rejects arguments whose key is in none of these groups; the command itself checks all else.

    A group is taken from `options`, which may import it, only if those before it lack a key.
    """
    _, unknown = split_paths([word for word in arguments if not word.startswith("--resume=")])
    taken, left = [], iter(options)
    while unknown and (group := next(left, None)):
        taken.append(group)
        unknown = [word for word in unknown if word.partition("=")[0] not in parsing.keys_of(group)]
    if unknown:
        parsing.parse_overrides(unknown[:1], *taken)  # raises the error of this key


def parse_keys(arguments: list[str]) -> dict:
    """Returns the given keys of a run; expands a ~ after =, as not every shell does."""
    overrides = parsing.parse_overrides(arguments, Config)
    return overrides | {key: expand_home(overrides[key]) for key in ("out", "base") if key in overrides}


def split_paths(arguments: list[str]) -> tuple[list[str], list[str]]:
    """Separates paths from key=value arguments."""
    paths = [word for word in arguments if storage.is_path(word)]
    return paths, [word for word in arguments if word not in paths]


def run_folder(word: str) -> Path | BucketPath:
    """Returns the path of a run folder; suggests checkpoints/NAME for the bare name of a run there."""
    if storage.is_url(word):
        return storage.location(word)
    suggested = Path("checkpoints", word)
    if not Path(word).exists() and suggested.is_dir():
        raise UsageError(f"{word} is not a run; did you mean {suggested}?")
    return Path(word)


def parse_run_and_options(arguments: list[str], options: type[T]) -> tuple[Path | BucketPath, T]:
    """Parses 'RUN key=value ...'."""
    if not arguments or not storage.is_path(arguments[0]):
        raise UsageError("name the folder of a run first, such as checkpoints/NAME")
    return run_folder(arguments[0]), parsing.parse_options(arguments[1:], options)


def say_text(text: str) -> None:
    """Prints a model's text on the first process; a terminal would obey the control characters in it."""
    say(escape_for_terminal(text))


def escape_for_terminal(text: str) -> str:
    """Returns the text, without control characters if standard output is a terminal."""
    return escape_controls(text) if sys.stdout.isatty() else text


def say_table(rows: Sequence[Sequence], header: Sequence[str]) -> None:
    """Prints rows as a table, or one below another on a terminal that is too narrow for it."""
    table = format_table(rows, header)
    widest = max(map(len, table.splitlines()))
    fits = not sys.stdout.isatty() or widest <= shutil.get_terminal_size().columns
    say(table if fits else format_blocks(rows, header))


def say(text: str) -> None:
    """Prints on the first process only: a command's answer, which is no message and is never silenced."""
    if is_first_process():
        print(text, flush=True)
