"""`train base=...` without a preset: the model is the base's, a run or a Hugging Face folder that becomes one first."""

import os
import subprocess
import sys
from pathlib import Path

from shardformer import data, storage
from shardformer.checkpoint import read_config
from shardformer.cli.words import parse_keys, say
from shardformer.config import ARCHITECTURE, Config, check_zero, presets
from shardformer.convert import hf_settings
from shardformer.data import Characters, Numbers, Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import locked, make_folder, replacing
from shardformer.training.run_folder import Run

OUT = "checkpoints/finetune"


def has_base_alone(words: list[str]) -> bool:
    return bool(words) and all("=" in word for word in words) and any(word.startswith("base=") for word in words)


def parse_base(words: list[str]) -> Config:
    """The config of 'base=FOLDER key=value ...': the model of the base, the rest as the preset `finetune` has it."""
    overrides = parse_keys(words)
    out, base = overrides.get("out") or OUT, overrides.get("base", "")
    if hf_settings.is_hf_folder(storage.location(base)):
        target = storage.local_folder(storage.location(f"{out}.base"))
        _check_before_converting(base, target, overrides, out)
        base = _convert(str(storage.local_path(base, say)), target, overrides.get("seq", 0))
    return _choose_settings(read_config(base), base, overrides, out)


def _check_before_converting(base: str, target: Path, overrides: dict, out: str) -> None:
    """What would be refused afterwards is refused before gigabytes are copied and written."""
    converted = (target / "config.json").is_file()
    seq = overrides.get("seq", 0)
    model = read_config(target) if converted else hf_settings.read_model(storage.location(base), seq=seq).config
    settings = _choose_settings(model, base, overrides, out)
    check_zero(settings)
    Run(settings, Numbers(settings.vocab), "").refuse_to_overwrite()  # whatever its vocabulary will be


def _choose_settings(model: Config, base: str, overrides: dict, out: str) -> Config:
    fixed = {name: getattr(model, name) for name in ARCHITECTURE}
    for name in fixed.keys() & overrides.keys():
        if overrides[name] != fixed[name]:
            raise UsageError(f"{name}={overrides[name]} contradicts base={base}, which has {name}={model.shown(name)}")
    return presets.finetune().replace(**fixed, out=out, base=base).override(overrides | {"out": out, "base": base})


def open_vocabulary_of_base(settings: Config) -> Vocabulary:
    """The tokenizer that the base was trained with; token ids without one are read by the one that is named."""
    base, wanted = Run.open(settings.base), settings.tokenizer
    vocabulary = base.vocabulary
    if wanted not in ("auto", base.config.tokenizer):
        made_from_text = wanted == Characters.name or wanted.startswith("bpe:")
        named = None if made_from_text else data.open_vocabulary(wanted, base.config.vocab)
        same = named is not None and named.with_special_tokens() == vocabulary.with_special_tokens()
        if not same and (made_from_text or not isinstance(vocabulary, Numbers)):
            raise UsageError(
                f"tokenizer={wanted} contradicts base={settings.base}, which was trained on tokens of "
                f"{base.config.tokenizer}; leave it out"
            )
        vocabulary = named
    return vocabulary.with_special_tokens() if settings.special_tokens else vocabulary


def _convert(source: str, target: Path, seq: int = 0) -> str:
    """In a process of its own: converting takes the CPU alone, and training what the machine has."""
    make_folder(target.parent)
    origin, path = target.with_name(f".{target.name}.source"), os.fsencode(Path(source).resolve())
    with locked(target.with_name(f".{target.name}.lock")):  # processes of one machine that start together convert once
        if (target / "config.json").is_file():
            if origin.is_file() and (before := origin.read_bytes()) != path:
                raise UsageError(
                    f"{target} was converted from {os.fsdecode(before)}, not from {source}; remove it, or give "
                    "another out="
                )
            say(f"base={source}: taken from {target}, into which it was converted before")
            return str(target)
        with replacing(origin) as temporary:
            temporary.write_bytes(path)
        command = [sys.executable, "-m", "shardformer", "convert", source, str(target)]
        command += [f"seq={seq}"] if seq else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2].removeprefix("shardformer: ")
        kind = UsageError if done.returncode == 2 else RunError
        raise kind(message.removeprefix("error: ").removeprefix("failed: ") or f"{source} could not be converted")
    say(done.stdout.strip())
    return str(target)
