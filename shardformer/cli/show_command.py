"""`show`: the settings of a preset or a run and the split of every parameter, without a device."""

from pathlib import Path

from shardformer import optim, storage
from shardformer.analysis import parameter_tables
from shardformer.analysis.memory import format_device_bytes
from shardformer.cli.words import parameter_count, parse_preset, say
from shardformer.config import Config, parsing
from shardformer.context.choice import Rates, choose_way
from shardformer.hardware.chips import CHIPS
from shardformer.kernels.fused_attention import CPU
from shardformer.model import Model, lora
from shardformer.model.model import describe_chip
from shardformer.parallel import mesh
from shardformer.run import Run
from shardformer.shards.attention import choose_method, find_kernel_obstacle, find_ring_obstacle
from shardformer.tables import format_table

DEVICES = {
    "CPU": CPU,
    "TPU": describe_chip("tpu", CHIPS["v5p"]),
    "NVIDIA GPU, from Hopper on": describe_chip("gpu", CHIPS["h100"]),
}
WHY_NO_KERNEL = "reason for no kernel"
WHY_THIS_WAY = "reason for the way, at the rates of a v5p or an H100"
KERNEL_NEEDS_RING = "the kernel computes the turns of a ring"


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
    say(parameter_tables.format_splits(parameters, settings))
    learned = lora.select_learned(parameters, settings)
    optim.average.check_names(parameters, settings)
    if settings.lr_rules:
        say(parameter_tables.format_rules(learned, settings))
    say(format_device_bytes(settings))
    say(format_attention(settings))
    say(parameter_count(parameters, learned))


def format_attention(config: Config) -> str:
    """Formats how training computes attention on each kind of device, and why."""
    rows = []
    for devices, hardware in DEVICES.items():
        job = hardware, config.seq // config.cp, bool(config.dropout), config.mask_documents
        method = choose_method(config.without_gradients(), *job)  # attention=fused is only rejected on devices
        name = "fused" if method.kernel else f"blocks of {method.block} tokens" if method.block else "plain"
        reason = find_kernel_obstacle(config, *job) if config.attention in ("auto", "fused") else "as attention= says"
        if method.way:
            choice = choose_way(config, Rates(hardware.flops, hardware.wire))
            name, reason = f"{method.way}, {name}", KERNEL_NEEDS_RING
            if not method.kernel:
                reason = f"{choice.reason} (no kernel: {find_ring_obstacle(config, *job)})"
        rows.append([devices, name, reason])
    return format_table(rows, ["devices", "attention", WHY_THIS_WAY if config.cp > 1 else WHY_NO_KERNEL])
