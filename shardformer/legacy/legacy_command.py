"""The command `legacy`: runs a script with the removed names put back, lists the names, or prints a patch."""

import importlib
import itertools
from pathlib import Path
from typing import Any

from shardformer.errors import UsageError
from shardformer.legacy.check_source import check

OPTIONS = {"--strict": "strict", "--legacy-random": "legacy_random"}
VERBOSE = "--verbose"
USAGE = f"[{'] ['.join([VERBOSE, *OPTIONS])}] SCRIPT.py ..., --check PATH ..., or --migrate PATH ..."


def main(arguments: list[str]) -> int:
    """`[--verbose] [--strict] [--legacy-random] SCRIPT.py ...`, `--check PATH ...` or `--migrate PATH ...`.

    What follows SCRIPT.py is the script's own.
    """
    flags = list(itertools.takewhile(lambda word: word.startswith("-"), arguments))
    rest = arguments[len(flags) :]
    if flags == ["--check"] and rest:
        return check(map(Path, rest))
    if flags == ["--migrate"] and rest:
        return _load("migration.migrate").migrate(map(Path, rest))
    wrong = [flag for flag in flags if flag not in OPTIONS and flag != VERBOSE]
    if wrong or not rest:
        got = f"got {' '.join(arguments)}" if arguments else "got nothing"
        raise UsageError(f"legacy takes {USAGE}; {got}")
    options = {option: flag in flags for flag, option in OPTIONS.items()}
    _load("script").run(rest[0], rest[1:], verbose=VERBOSE in flags, **options)
    return 0


def _load(module: str) -> Any:
    """Imports what `--check` does without: the other two need jax."""
    return importlib.import_module(f"shardformer.legacy.{module}")
