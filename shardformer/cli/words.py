"""Functions of all commands: a preset or a run folder from the arguments, and printing on the first process."""

import sys
from pathlib import Path
from typing import TypeVar

import jax

from shardformer import storage
from shardformer.checkpoint import read_config
from shardformer.config import Config, override_on_resume, parsing, presets
from shardformer.convert import hf_settings
from shardformer.errors import UsageError
from shardformer.files import expand_home
from shardformer.storage import BucketPath
from shardformer.tables import escape_controls

T = TypeVar("T")


def parse_preset(words: list[str]) -> Config:
    """Returns the config of 'PRESET key=value ...'."""
    if not words:
        raise UsageError(f"name a preset: {', '.join(presets.PRESETS)}")
    if words[0] not in presets.PRESETS and (storage.location(words[0]) / "config.json").is_file():
        raise UsageError(f"{words[0]} is a run; to continue it: train --resume {words[0]}")
    settings = presets.preset(words[0])
    overrides = parse_keys(words[1:])
    return settings.override(overrides | {"out": overrides.get("out") or settings.run.out})


def parse_keys(words: list[str]) -> dict:
    """Returns the given keys of a run; expands a ~ after =, as not every shell does."""
    overrides = parsing.parse_overrides(words, Config)
    return overrides | {key: expand_home(overrides[key]) for key in ("out", "base") if key in overrides}


def parse_settings(words: list[str]) -> Config:
    """Returns the config of 'PRESET|RUN|HF_FOLDER key=value ...'; without vocab=, that of tiny_shakespeare."""
    folder = storage.location(words[0]) if words else None
    if folder and hf_settings.is_hf_folder(folder):
        _, settings = hf_settings.read_config(folder)
        settings = settings.replace(**parsing.parse_overrides(words[1:], Config))
    elif folder and (folder / "config.json").is_file():
        settings = override_on_resume(read_config(folder), parsing.parse_overrides(words[1:], Config))
    else:
        settings = parse_preset(words)
    return settings.replace(vocab=settings.model.vocab or 65)


def split_places(words: list[str]) -> tuple[list[str], list[str]]:
    """Separates paths from key=value arguments."""
    places = [word for word in words if storage.is_place(word)]
    return places, [word for word in words if word not in places]


def run_folder(word: str) -> Path | BucketPath:
    """Returns the path of a run folder; suggests checkpoints/NAME for the bare name of a run there."""
    if storage.is_url(word):
        return storage.location(word)
    kept = Path("checkpoints", word)
    if not Path(word).exists() and kept.is_dir():
        raise UsageError(f"{word} is not a run; did you mean {kept}?")
    return Path(word)


def parse_run_and_options(words: list[str], options: type[T]) -> tuple[Path | BucketPath, T]:
    """Parses 'RUN key=value ...'."""
    if not words or not storage.is_place(words[0]):
        raise UsageError("name the folder of a run first")
    return run_folder(words[0]), parsing.parse_options(words[1:], options)


def say_text(text: str) -> None:
    """Prints a model's text on the first process; a terminal would obey the control characters in it."""
    say(escape_for_terminal(text))


def escape_for_terminal(text: str) -> str:
    """Returns the text, without control characters if standard output is a terminal."""
    return escape_controls(text) if sys.stdout.isatty() else text


def say(text: str) -> None:
    """Prints on the first process only."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        print(text, flush=True)
