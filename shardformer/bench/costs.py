"""`bench accumulation`: time and memory of each accumulation mode; `bench zero`: bytes on one device."""

import math
import time

import jax
import numpy as np

from shardformer.analysis.live import bytes_by_device
from shardformer.analysis.verify import random_batch
from shardformer.bench.bench_options import Measuring
from shardformer.bench.contenders import RepeatedBatch, measure, ours
from shardformer.config import Config, parsing
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.tables import format_table

PARTS = (1, 4, 16)
BATCH = 64  # if the preset's batch does not divide


def bench_accumulation(options: Measuring, base: Config) -> None:
    """Prints time, temporary memory and compile time of a step for each accumulation mode."""
    base = mesh.start(base)
    settings = with_batch(base, base.parallel.dp * max(PARTS))
    batches, contenders, rows = RepeatedBatch(random_batch(settings)), [], []
    for parts in PARTS:
        for mode in ("scan", "multisteps", "manual") if parts > 1 else ("scan",):
            start = time.perf_counter()
            contenders.append(it := ours(settings.replace(accum=parts, accum_mode=mode), batches, mode))
            seconds = time.perf_counter() - start
            name = mode if parts > 1 else "full"
            rows.append([name, str(parts), f"{it.temporary_bytes / 1e6:.1f}", f"{seconds:.1f}"])
    measure(contenders, options)
    for row, contender in zip(rows, contenders, strict=True):
        row += [f"{np.median(contender.times):.1f}", f"{contender.speed(contenders[0]):.2f}"]
    print(
        f"{title(options, settings, base)}, mesh {settings.parallel.mesh}, on "
        f"{jax.devices()[0].device_kind}; {options.describe_turns()}\n"
        + format_table(rows, ["accum_mode", "accum", "temporary MB/device", "compile s", "ms", "speed"])
    )


def bench_zero(options: Measuring, base: Config) -> None:
    """Prints the bytes of parameters and optimizer state on one device, live, and the temporary bytes of a step."""
    if base.parallel.pp > 1:
        raise UsageError(
            "bench zero shows the splits over dp and mp, without pipeline stages: give "
            f"mesh={base.parallel.dp * base.parallel.pp}x{base.parallel.mp}; got mesh={base.parallel.mesh}"
        )
    shapes = ("8x1", "4x2") if base.parallel.mesh in ("1x1", "auto") else (base.parallel.mesh,)
    mesh.use_cpu_devices(max(8, *(math.prod(parsing.parse_mesh(shape)) for shape in shapes)))
    settings = with_batch(base, base.training.accum * math.lcm(*(parsing.parse_mesh(shape)[0] for shape in shapes)))
    batches, rows = RepeatedBatch(random_batch(settings)), []
    for shape in shapes:
        for level in (0, 1, 3):
            c = settings.replace(mesh=shape, zero=level)
            it = ours(c, batches, shape)
            row = [shape, str(level)]
            for tree in (it.state.params, it.state.optimizer):
                whole = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
                ideal = whole / c.parallel.mp / (c.parallel.dp if level else 1)
                stored = max(bytes_by_device(tree).values())
                row += [f"{stored / 1e6:.3f}", f"{ideal / 1e6:.3f}", f"{stored / ideal:.3f}"]
            temporary = f"{it.temporary_bytes / 1e6:.3f}"
            rows.append([*row, temporary, ", ".join(Model.on(c, mesh.make(c)).not_scattered) or "-"])
    columns = ["parameters MB", "ideal", "ratio", "optimizer MB", "ideal", "ratio", "peak temporary MB"]
    print(
        f"{title(options, settings, base)}, on one device; ideal: split over mp, and over dp by zero\n"
        + format_table(rows, ["mesh", "zero", *columns, "replicated over dp"])
    )


def with_batch(c: Config, parts: int) -> Config:
    """Returns the configuration with a batch that divides into so many parts."""
    return c if c.training.batch % parts == 0 else c.replace(batch=math.lcm(BATCH, parts))


def title(options: Measuring, c: Config, base: Config) -> str:
    instead = (
        f" (batch={base.training.batch} does not divide into the parts)"
        if c.training.batch != base.training.batch
        else ""
    )
    return f"{options.preset}: {c.training.batch} x {c.model.seq} tokens a step{instead}"
