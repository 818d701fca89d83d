"""What all commands share: reading a preset or a run folder from a command's words, and printing lines."""

import os
from pathlib import Path
from typing import TypeVar

import jax

from shardformer import parsing, presets, specs, storage
from shardformer.config import Config, override_on_resume, read_config
from shardformer.convert import hf_settings
from shardformer.errors import UsageError
from shardformer.storage import BucketPath

T = TypeVar("T")
NEEDS = {"lora_targets": "lora_rank", "lora_alpha": "lora_rank", "ema_names": "ema"}


def parse_preset(words: list[str]) -> Config:
    """The config of 'PRESET key=value ...'."""
    if not words:
        raise UsageError(f"name a preset: {', '.join(presets.PRESETS)}")
    if words[0] not in presets.PRESETS and (storage.location(words[0]) / "config.json").is_file():
        raise UsageError(f"{words[0]} is a run; to continue it: train --resume {words[0]}")
    settings = presets.preset(words[0])
    overrides = parsing.parse_overrides(words[1:], Config)
    out = overrides.get("out") or settings.out
    paths = {"out": out, "base": overrides.get("base", "")}  # not every shell expands a ~ after =
    settings = settings.replace(**overrides | {key: os.path.expanduser(path) for key, path in paths.items()})
    check_needed(settings, overrides)
    return settings


def check_needed(settings: Config, overrides: dict) -> None:
    """Refuses a key that does nothing without another."""
    for key, needed in NEEDS.items():
        if key in overrides and not getattr(settings, needed):
            raise UsageError(f"{key} does nothing without {needed}; give {needed} as well")


def parse_settings(words: list[str]) -> Config:
    """The config of 'PRESET|RUN|HF_FOLDER key=value ...', with tiny_shakespeare's vocabulary where none is given."""
    folder = storage.location(words[0]) if words else None
    if folder and hf_settings.is_hf_folder(folder):
        _, settings = hf_settings.read_config(folder)
        settings = settings.replace(**parsing.parse_overrides(words[1:], Config))
    elif folder and (folder / "config.json").is_file():
        settings = override_on_resume(read_config(folder), parsing.parse_overrides(words[1:], Config))
    else:
        settings = parse_preset(words)
    return settings.replace(vocab=settings.vocab or 65)


def split_places(words: list[str]) -> tuple[list[str], list[str]]:
    """The words that name files or folders, and those that set keys."""
    places = [word for word in words if storage.is_place(word)]
    return places, [word for word in words if word not in places]


def run_folder(word: str) -> Path | BucketPath:
    if storage.is_url(word):
        return storage.location(word)
    kept = Path("checkpoints", word)
    if not Path(word).exists() and kept.is_dir():
        raise UsageError(f"{word} is not a run; did you mean {kept}?")
    return Path(word)


def parse_run_and_options(words: list[str], options: type[T]) -> tuple[Path | BucketPath, T]:
    if not words or not storage.is_place(words[0]):
        raise UsageError("name the folder of a run first")
    return run_folder(words[0]), parsing.parse_options(words[1:], options)


def parameter_count(parameters, learned) -> str:
    every, some = specs.count_parameters(parameters), specs.count_parameters(learned)
    adapters = f" ({some:,} of them learn: {some / every:.1%})" if some < every else ""
    return f"{every / 1e6:,.2f}M parameters{adapters}"


def say(text: str) -> None:
    """Prints on the first process alone."""
    if not jax.distributed.is_initialized() or jax.process_index() == 0:
        print(text, flush=True)
