"""`show`: the settings of a preset or a run and the split of every parameter, without a device."""

from pathlib import Path

from shardformer import storage
from shardformer.adapters.adapter_keys import select_trainable
from shardformer.analysis import parameter_tables
from shardformer.analysis.memory import format_device_bytes, make_trainer
from shardformer.cli.arguments import describe_depth, names_depth, parse_preset, say
from shardformer.config import Config, parsing
from shardformer.devices.chips import CHIPS, CPU, describe_chip
from shardformer.layout import Layout, mesh, resolve
from shardformer.model import flops
from shardformer.model.task_on_mesh import choose_task
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
        if names_depth(arguments):
            say(f"{describe_depth(arguments)}\n")
    settings = settings.replace(accum=settings.training.accum or settings.parallel.pp)
    if settings.parallel.mesh == "auto":
        settings = settings.replace(mesh="1x1")
    mesh.use_cpu_devices(1)
    describe = describe_transformer if settings.objective.reads_tokens else describe_task
    say(describe(settings.replace(vocab=settings.model.vocab or 65)))  # tiny_shakespeare's


def describe_transformer(settings: Config) -> str:
    """Formats the settings of a language or reward model, its parameters, bytes and choices."""
    parameters = choose_task(settings).abstract_parameters(settings)
    stored = resolve(settings).weights.store(parameters)
    splits = parameter_tables.find_splits(stored, settings)
    tables = [settings.to_json().rstrip(), parameter_tables.format_splits(stored, splits, settings)]
    trained = select_trainable(parameters, settings)
    if settings.optimizer.lr_rules:
        tables.append(parameter_tables.format_rules(trained, settings))
    tables += [format_device_bytes(settings), format_choices(settings)]
    return "\n\n".join(tables) + f"\n\n{parameter_count(parameters, trained)}{flops.describe_active(settings)}"


def describe_task(settings: Config) -> str:
    """Formats the settings of a user's task, its parameters and bytes."""
    model = make_trainer(settings).model
    tables = [settings.to_json().rstrip(), parameter_tables.format_splits(model.shapes, model.specs, settings)]
    if settings.optimizer.lr_rules:
        tables.append(parameter_tables.format_rules(model.shapes, settings))
    tables += [format_device_bytes(settings), parameter_count(model.shapes, model.shapes)]
    return "\n\n".join(tables)


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
