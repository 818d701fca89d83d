"""`show`: the settings of a preset or a run and the split of every parameter, without a device."""

from pathlib import Path

from shardformer import storage
from shardformer.analysis import parameter_tables
from shardformer.analysis.memory import format_device_bytes
from shardformer.cli.arguments import parse_preset, say
from shardformer.config import Config, parsing
from shardformer.devices.chips import CHIPS, CPU, describe_chip
from shardformer.layout import Layout, mesh, resolve
from shardformer.model import Model, flops, lora
from shardformer.start_messages import parameter_count
from shardformer.tables import format_table
from shardformer.training.run_folder import Run

DEVICES = {
    "CPU": CPU,
    "TPU": describe_chip("tpu", CHIPS["v5p"]),
    "NVIDIA GPU, from Hopper on": describe_chip("gpu", CHIPS["h100"]),
}
CHOICES = ("replicas", "remat", "loop", "pipeline", "loss_chunk", "experts", "expert_axes")  # fields of Layout


def show(arguments: list[str]) -> None:
    """Prints the settings, the split of every parameter and the bytes of each device."""
    if arguments and (storage.is_url(arguments[0]) or (Path(arguments[0]) / "config.json").is_file()):
        settings = Run.open(arguments[0], parsing.parse_overrides(arguments[1:], Config)).config
    else:
        settings = parse_preset(arguments)
    settings = settings.replace(
        vocab=settings.model.vocab or 65, accum=settings.training.accum or settings.parallel.pp
    )  # tiny_shakespeare's
    if settings.parallel.mesh == "auto":
        settings = settings.replace(mesh="1x1")
    mesh.use_cpu_devices(1)
    say(settings.to_json())
    parameters = Model.abstract_parameters(settings)
    tables = [parameter_tables.format_splits(resolve(settings).weights.store(parameters), settings)]
    trained = lora.select_trainable(parameters, settings)
    if settings.optimizer.lr_rules:
        tables.append(parameter_tables.format_rules(trained, settings))
    tables += [format_device_bytes(settings), format_choices(settings)]
    say("\n\n".join(tables) + "\n")
    say(parameter_count(parameters, trained) + flops.describe_active(settings))


def format_choices(config: Config) -> str:
    """Formats every choice of training on each kind of device, and why."""
    config = (
        config.replace(attention="auto") if config.parallel.attention == "fused" else config
    )  # only devices reject it
    layouts = {devices: resolve(config, hardware) for devices, hardware in DEVICES.items()}
    return f"{format_attention(layouts)}\n\n{format_others(layouts)}"


def format_attention(layouts: dict[str, Layout]) -> str:
    """Formats the attention method on each kind of device, and why."""
    rows = [[devices, str(layout.attention), layout.reasons["attention"]] for devices, layout in layouts.items()]
    return format_table(rows, ["devices", "attention", "reason, at the rates of a v5p or an H100"])


def format_others(layouts: dict[str, Layout]) -> str:
    """Formats the other choices, which rarely depend on the devices; a reason that does is printed for each kind."""
    rows = []
    for name in CHOICES:
        reasons = {devices: layout.reasons.get(name) for devices, layout in layouts.items()}
        if None in reasons.values():  # experts, in a model without them
            continue
        if len(set(reasons.values())) == 1:
            rows.append([name, next(iter(reasons.values()))])
        else:
            rows += [[f"{name}, {devices}", reason] for devices, reason in reasons.items()]
    return format_table(rows, ["choice", "reason"])
