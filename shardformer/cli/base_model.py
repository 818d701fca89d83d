"""Models that `train` starts from: `base=` and `teacher=`, a run, or a Hugging Face folder to convert to a run.

With `base=RUN/step_N`, the new run continues another run's checkpoint.
"""

import os
import subprocess
import sys
from pathlib import Path

from shardformer import checkpoint, storage
from shardformer.checkpoint import read_config
from shardformer.child_process import make_environment
from shardformer.cli.arguments import parse_keys, say
from shardformer.config import (
    ARCHITECTURE,
    Config,
    check_given,
    check_zero,
    override_on_resume,
    parse_config,
    parsing,
    presets,
)
from shardformer.convert import hf_settings
from shardformer.convert.convert_options import FromHf
from shardformer.data import TokenIds
from shardformer.data.corpus import check_sources
from shardformer.errors import RunError, UsageError
from shardformer.files import locked, make_folder, replacing
from shardformer.training.features_on_host import open_features
from shardformer.training.model_of_base import check_trained, reads_shorter_rows
from shardformer.training.run_folder import Run

OUT = "checkpoints/finetune"


def parse_base(arguments: list[str]) -> Config:
    """Returns the config of '[PRESET] base=FOLDER key=value ...'.

    The keys of the model are the base's, all others those of the preset, or of `finetune`. A Hugging Face folder is
    converted to a run first, next to `out`.
    """
    preset = presets.preset(arguments[0]) if arguments[0] in presets.PRESETS else presets.finetune().replace(out=OUT)
    options, rest = parsing.parse_known_options(arguments[arguments[0] in presets.PRESETS :], FromHf)
    overrides = parse_keys(rest)
    preset = preset.replace(base=overrides["base"], out=overrides.get("out") or preset.run.out)
    if not storage.location(preset.training.base).exists():
        raise UsageError(
            f"base={preset.training.base} does not exist; give the folder of a run, or the one into which a model of "
            "Hugging Face was downloaded: hf download NAME --local-dir FOLDER"
        )
    if hf_settings.is_hf_folder(storage.location(preset.training.base)):
        target = storage.local_folder(storage.location(f"{preset.run.out}.base"))
        _check_before_converting(preset, target, overrides, options)
        source = str(storage.local_path(preset.training.base))
        settings = {"seq": overrides.get("seq", 0), "ignore_config": options.ignore_config}
        preset = preset.replace(base=convert_once("base", source, target, settings))
    elif options.ignored:
        raise UsageError(
            f"ignore_config={options.ignore_config} is for a base in Hugging Face's format, and "
            f"base={preset.training.base} is "
            "not; leave it out"
        )
    return _choose_settings(read_config(storage.location(preset.training.base)), preset, overrides)


def _check_before_converting(preset: Config, target: Path, overrides: dict, options: FromHf) -> None:
    """Rejects what training would reject afterwards, before gigabytes are copied and written."""
    if (target / "config.json").is_file():
        model = read_config(target)
    else:
        source = storage.location(preset.training.base)
        model = hf_settings.read_model(source, options.ignored, overrides.get("seq", 0)).config
    settings = _choose_settings(model, preset, overrides)
    check_trained(settings, model)
    check_zero(settings)
    open_features(settings)
    check_sources(settings)
    Run(settings, TokenIds(settings.model.vocab), "").refuse_to_overwrite()  # whatever its vocabulary will be


def _choose_settings(model: Config, preset: Config, overrides: dict) -> Config:
    stored = ("weights",) if model.stored.quantized else ()
    fixed = {name: model.get(name) for name in (*ARCHITECTURE, *stored)}
    if "seq" in overrides and reads_shorter_rows(model.replace(seq=overrides["seq"]), model):
        fixed["seq"] = overrides["seq"]
    for name in fixed.keys() & overrides.keys():
        if overrides[name] != fixed[name]:
            table = " and a table of learned positions" if name == "seq" and model.model.positions == "learned" else ""
            raise UsageError(
                f"{name}={overrides[name]} contradicts base={preset.training.base}, which has "
                f"{name}={model.shown(name)}{table}; leave {name}= out"
            )
    return preset.replace(**fixed).override(overrides | {"out": preset.run.out, "base": preset.training.base})


def convert_once(name: str, source: str, target: Path, settings: dict | None = None) -> str:
    """Returns the run `target` that the folder of the key `name` is converted to, now or by an earlier start.

    Converts in a separate process: a conversion uses only the CPU, and training uses the accelerator.
    """
    make_folder(target.parent)
    origin, path = target.with_name(f".{target.name}.source"), os.fsencode(Path(source).resolve())
    with locked(target.with_name(f".{target.name}.lock")):  # processes of one machine that start together convert once
        if (target / "config.json").is_file():
            if origin.is_file() and (before := origin.read_bytes()) != path:
                raise UsageError(
                    f"{target} was converted from {os.fsdecode(before)}, not from {source}; remove it, or give "
                    "another out="
                )
            say(f"{name}={source}: taken from {target}, into which it was converted before")
            return str(target)
        with replacing(origin) as temporary:
            temporary.write_bytes(path)
        given = [f"{key}={value}" for key, value in (settings or {}).items() if value]
        say(convert_in_process(source, target, *given))
    return str(target)


def convert_in_process(source: str, target: Path, *words: str) -> str:
    """Runs `convert` in a separate process, which uses only the CPU; returns what it prints."""
    command = [sys.executable, "-m", "shardformer", "convert", source, str(target), *words]
    done = subprocess.run(command, env=make_environment(), capture_output=True, text=True, check=False)
    if done.returncode:
        message = done.stderr.strip().rpartition("\n")[2].removeprefix("shardformer: ")
        kind = UsageError if done.returncode == 2 else RunError
        raise kind(message.removeprefix("error: ").removeprefix("failed: ") or f"{source} could not be converted")
    return done.stdout.strip()


def convert_teacher(config: Config) -> Config:
    """Returns the configuration of a new run with its teacher as a run, OUT.teacher, which a resume finds again."""
    from shardformer.objectives.distillation_model import check_teacher  # not imported without a teacher

    name = config.preferences.teacher
    if not hf_settings.is_hf_folder(storage.location(name)):
        return config
    target = storage.local_folder(storage.location(f"{config.run.out}.teacher"))
    if (target / "config.json").is_file():
        teacher = read_config(target)
    else:  # reject what training would reject afterwards, before gigabytes are copied and written
        teacher = hf_settings.read_model(storage.location(name), seq=_choose_positions(name, config)).config
    check_teacher(config, teacher, name)
    check_zero(config)
    Run(config, TokenIds(config.model.vocab or 1), "").refuse_to_overwrite()
    source = str(storage.local_path(name))
    return config.replace(teacher=convert_once("teacher", source, target, {"seq": _choose_positions(name, config)}))


def _choose_positions(name: str, config: Config) -> int:
    """Returns the student's context if the teacher has a longer table of learned positions, of which a part is read."""
    model = hf_settings.read_model(storage.location(name)).config.model
    return config.model.seq if model.positions == "learned" and config.model.seq < model.seq else 0


def parse_branch(arguments: list[str]) -> tuple[Config, Config]:
    """Returns the configuration of the new run and that of the checkpoint which it continues.

    The new run has the keys of the checkpoint, except those that are given; a resume could change these as well.
    """
    if arguments[0] in presets.PRESETS:
        raise UsageError(
            f"a run that continues a checkpoint has the keys of its base, got the preset {arguments[0]}; leave it out"
        )
    given = parse_keys(arguments)
    base, out = (given.pop(name, "") for name in ("base", "out"))
    if not out:
        raise UsageError(f"base={base} starts a new run from a checkpoint of another; give its folder: out=NEW")
    base, step = parsing.split_checkpoint(base)
    source = Run.open(base)
    folder = checkpoint.step_folder(source.out, source.choose_step(step))
    before = parse_config(checkpoint.read_document(folder, "config.json"), folder / "config.json")
    settings = override_on_resume(before, given)
    check_given(settings, {key: value for key, value in given.items() if value != before.get(key)})
    return settings.replace(base=str(folder), out=out), before
