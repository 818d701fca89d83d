"""`train base=RUN from_step=N key=value ...`: a new run that continues another run's checkpoint."""

from shardformer import checkpoint
from shardformer.cli.arguments import parse_keys
from shardformer.config import Config, check_given, override_on_resume, parse_config, presets
from shardformer.errors import UsageError
from shardformer.training.run_folder import Run


def names_step(arguments: list[str]) -> bool:
    """Returns whether the arguments of `train` name a step of another run to start from."""
    return any(word.startswith("from_step=") and word != "from_step=0" for word in arguments)


def parse_branch(arguments: list[str]) -> tuple[Config, Config]:
    """Returns the configuration of the new run and that of the checkpoint which it continues.

    The new run has the keys of the checkpoint, except those that are given; a resume could change these as well.
    """
    if arguments[0] in presets.PRESETS:
        raise UsageError(f"a run from from_step= has the keys of its base, got the preset {arguments[0]}; leave it out")
    given = parse_keys(arguments)
    base, step, out = (given.pop(name, "") for name in ("base", "from_step", "out"))
    if not base or not out:
        raise UsageError(
            f"from_step={step} starts a new run from a checkpoint of another; give both folders: base=RUN out=NEW"
        )
    source = Run.open(base)
    folder = checkpoint.step_folder(source.out, source.choose_step(step))
    before = parse_config(checkpoint.read_document(folder, "config.json"), folder / "config.json")
    settings = override_on_resume(before, given)
    check_given(settings, {key: value for key, value in given.items() if value != before.get(key)})
    if settings.training.steps <= step:
        raise UsageError(
            f"from_step={step} leaves no step to train, got steps={settings.training.steps}; give more steps"
        )
    return settings.replace(base=str(source.out), from_step=step, out=out), before
