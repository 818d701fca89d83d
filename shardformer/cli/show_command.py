"""`show`: the settings of a preset or a run and the split of every parameter, without a device."""

from pathlib import Path

from shardformer import optim, storage
from shardformer.analysis.memory import format_device_bytes
from shardformer.cli.words import parameter_count, parse_preset, say
from shardformer.config import Config, parsing
from shardformer.model import Model, lora
from shardformer.parallel import mesh, specs
from shardformer.run import Run


def show(words: list[str]) -> None:
    """Prints the settings, the split of every parameter and the bytes of each device."""
    if words and (storage.is_url(words[0]) or (Path(words[0]) / "config.json").is_file()):
        settings = Run.open(words[0], parsing.parse_overrides(words[1:], Config)).config
    else:
        settings = parse_preset(words)
    settings = settings.replace(vocab=settings.vocab or 65, accum=settings.accum or settings.pp)  # tiny_shakespeare's
    if settings.mesh == "auto":
        settings = settings.replace(mesh="1x1")
    mesh.use_cpu_devices(1)
    say(settings.to_json())
    parameters = Model.abstract_parameters(settings)
    say(specs.format_table(parameters, settings))
    learned = lora.select_learned(parameters, settings)
    optim.average.check_names(parameters, settings)
    if settings.lr_rules:
        say(optim.rules.format_table(learned, settings))
    say(format_device_bytes(settings))
    say(parameter_count(parameters, learned))
