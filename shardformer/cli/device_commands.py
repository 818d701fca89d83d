"""`memory` and `verify`: the bytes of a step, and sharded against dense, on the devices of this machine."""

import dataclasses

from shardformer import jax_releases, storage
from shardformer.analysis import live, traced, verify
from shardformer.analysis.memory import format_device_bytes
from shardformer.cli.arguments import parse_settings, say
from shardformer.config import parsing
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """The picture (besides every key of a run)."""

    picture: str = key("memory.png", "picture to write; empty draws none")

    def __post_init__(self) -> None:
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


def run_memory(arguments: list[str]) -> None:
    """Prints, and draws, the bytes of one step; of quantised weights, only their bytes."""
    options, rest = parsing.parse_known_options(arguments, MemoryOptions)
    settings = parse_settings(rest)
    traced.check_one_program(settings)  # before JAX looks for devices
    settings = mesh.start(settings, say=say)
    if settings.stored.quantized and not settings.lora.lora_rank:  # a step needs gradients
        return say(format_device_bytes(settings))
    measured = live.measure(settings)
    say(live.format_measured(measured))
    if options.picture:
        from shardformer.analysis import pictures

        pictures.draw_memory(measured, options.picture)
        say(f"drawn in {options.picture}")


def run_verify(arguments: list[str]) -> int:
    """Compares a sharded with a dense model; returns 1 if they differ."""
    settings = parse_settings(arguments)
    if settings.stored.quantized:
        raise UsageError(
            f"verify compares with a dense model of float weights, got weights={settings.stored.weights}; leave it out"
        )
    settings = mesh.start(settings, say=say)
    if settings.parallel.devices == 1:
        raise UsageError("mesh=1x1 is the dense model itself; give a mesh of several devices, such as mesh=4x2")
    kind = mesh.find_devices()[0].device_kind
    say(
        f"mesh {settings.parallel.mesh} ({settings.parallel.mesh_axes}) of {kind} devices against a plain dense "
        "model, in float32"
    )
    try:
        rows = verify.verify_config(settings)
    except (ValueError, TypeError) as error:  # raised by JAX and Haiku for impossible slices and sums
        raise RunError(f"the sharded model cannot be traced: {' '.join(str(error).split())[:500]}") from None
    say(verify.format_differences(rows))
    passes = all(row.passes for row in rows)
    if not passes and mesh.find_devices()[0].platform == "cpu" and (fault := jax_releases.describe_faults()):
        say(fault)
    return 0 if passes else 1
