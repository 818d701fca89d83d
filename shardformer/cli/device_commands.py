"""`memory`, `verify` and `coordinates`: the bytes, the correctness and the size of a step, on this machine."""

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from shardformer import jax_releases
from shardformer.analysis import coordinates, live, traced, verify, verify_exact
from shardformer.analysis.memory import format_device_bytes
from shardformer.cli.analysis_options import CoordinateOptions, MemoryOptions, VerifyOptions
from shardformer.cli.arguments import say
from shardformer.cli.settings import parse_settings
from shardformer.config import Config, parsing
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.tables import format_count


def run_memory(arguments: list[str]) -> None:
    """Prints, and draws, the bytes of one step; of quantised weights, only their bytes."""
    options, rest = parsing.parse_known_options(arguments, MemoryOptions)
    settings = parse_settings(rest)
    traced.check_one_program(settings)  # before JAX looks for devices
    settings = mesh.start(settings)
    if settings.stored.quantized and not settings.lora.lora_rank:  # a step needs gradients
        return say(format_device_bytes(settings))
    measured = live.measure(settings)
    say(live.format_measured(measured))
    if options.picture:
        from shardformer.analysis import pictures

        pictures.draw_memory(measured, options.picture)
        say(f"drawn in {options.picture}")


def run_coordinates(arguments: list[str]) -> None:
    """Prints, and draws, how far the first steps move the logits of models of several sizes."""
    options, rest = parsing.parse_known_options(arguments, CoordinateOptions)
    settings = parse_settings(rest)
    if not settings.objective.has_dense_reference or settings.stored.quantized:
        raise UsageError(
            "coordinates trains with objective=lm and float weights, got "
            f"objective={settings.preferences.objective} weights={settings.stored.weights}; leave them out"
        )
    settings = mesh.start(settings)
    asked = {"d_model": options.widths, "layers": options.depths}
    models = {
        key: {int(size): coordinates.resize(settings, key, int(size)) for size in sizes.split(",")}
        for key, sizes in asked.items()
        if sizes
    }
    panels = {}
    for key, of_sizes in models.items():
        panels[key] = [coordinates.measure(model, size, options.steps) for size, model in of_sizes.items()]
        say(coordinates.format_movements(key, panels[key]))
    if options.picture:
        from shardformer.analysis import pictures

        pictures.draw_movements(panels, options.picture)
        say(f"drawn in {options.picture}")


def run_verify(arguments: list[str]) -> int:
    """Compares a sharded with a dense model; returns 1 if they differ."""
    options, rest = parsing.parse_known_options(arguments, VerifyOptions)
    if options.exact:
        return verify_without_devices(rest, options.memory)
    settings = parse_settings(rest)
    if settings.stored.quantized:
        raise UsageError(
            f"verify compares with a dense model of float weights, got weights={settings.stored.weights}; leave it "
            "out, or give exact=true, which compares with one device"
        )
    settings = mesh.start(settings)
    if settings.parallel.devices == 1:
        raise UsageError("mesh=1x1 is the dense model itself; give a mesh of several devices, such as mesh=4x2")
    kind = mesh.find_devices()[0].device_kind
    say(
        f"mesh {settings.parallel.mesh} ({settings.parallel.mesh_axes}) of {kind} devices against "
        f"{settings.objective.verified_against}, in float32"
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


def verify_without_devices(arguments: list[str], memory: float) -> int:
    """Compares a sharded program exactly with one device and the dense reference; returns 1 if they differ."""
    settings = parse_on_any_mesh(arguments)
    if settings.parallel.mesh == "auto" or settings.parallel.devices == 1:
        raise UsageError(
            f"exact=true compares a mesh of several devices with one device, got mesh={settings.parallel.mesh}; name "
            "any mesh, such as mesh=64x8: no device is needed"
        )
    verify_exact.use_no_accelerator()
    count = format_count(settings.parallel.devices, "device")
    say(f"mesh {settings.parallel.mesh} ({settings.parallel.mesh_axes}), {count}, in float64, without any of them")
    with show_parts(verify_exact.PARTS) as begin:
        rows = verify_exact.verify_exactly(settings, memory * 1e9, begin)
    say(verify.format_differences(rows))
    if all(row.passes for row in rows):
        return 0
    if found := verify_exact.explain(settings):
        say(found)
    return 1


def parse_on_any_mesh(arguments: list[str]) -> Config:
    """Returns the settings, whose batch has a row for each device along dp unless `batch=` is given."""
    given = dict(argument.split("=", 1) for argument in arguments if "=" in argument)
    if "batch" in given or given.get("mesh", "auto") == "auto":
        return parse_settings(arguments)
    others = [a for a in arguments if not a.startswith(("mesh=", "accum="))]
    batch = parse_settings([*others, "mesh=1x1", "accum=1"]).training.batch
    sizes = parsing.parse_mesh(given["mesh"])
    rows = sizes.dp * sizes.pp * int(given.get("accum", 1) or 1)
    if batch % rows == 0:
        return parse_settings(arguments)
    more = -(-batch // rows) * rows
    say(f"batch={batch} becomes batch={more}, as mesh={given['mesh']} splits it into {rows}")
    return parse_settings([*arguments, f"batch={more}"])


@contextlib.contextmanager
def show_parts(parts: Sequence[str]) -> Iterator[Callable[[str], None]]:
    """Shows a bar on a terminal; yields the function that starts a part."""
    columns = TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn()
    with Progress(*columns, console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty()) as progress:
        task = progress.add_task("", total=len(parts))
        yield lambda part: progress.update(task, description=part, completed=parts.index(part))
