"""`bench scaling`: fitted exponents of a step's time, compile time and memory in each size."""

import time

import jax
import numpy as np

from shardformer.analysis.verify import random_batch
from shardformer.bench.bench_options import Measuring
from shardformer.bench.contenders import RepeatedBatch, measure, ours
from shardformer.config import Config
from shardformer.config.parsing import MeshSizes
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.tables import format_count, format_table

FACTORS = (1, 2, 4)
SIZES = {
    "layers": lambda c, n: c.replace(layers=c.model.layers * n),
    "width": lambda c, n: c.replace(d_model=c.model.d_model * n),
    "context": lambda c, n: c.replace(seq=c.model.seq * n),
    "batch": lambda c, n: c.replace(batch=c.training.batch * n),
    "dp": lambda c, n: c.replace(mesh=f"{c.parallel.dp * n}x{c.parallel.mp}"),
    "mp": lambda c, n: c.replace(mesh=f"{c.parallel.dp}x{c.parallel.mp * n}"),
    "cp": lambda c, n: c.replace(mesh=str(MeshSizes(c.parallel.dp, c.parallel.mp, cp=c.parallel.cp * n))),
    "pp": lambda c, n: c.replace(mesh=f"{c.parallel.dp}x{c.parallel.mp}x{n}", accum=c.training.accum * FACTORS[-1]),
}


def bench_scaling(options: Measuring, base: Config) -> None:
    """Doubles each size twice, one size at a time; the settings of one size run interleaved."""
    mesh.use_cpu_devices(8)
    base = mesh.start(base)
    rows = []
    for name, grow in SIZES.items():
        try:
            settings = [grow(base, factor) for factor in FACTORS]
            if settings[-1].parallel.devices > len(mesh.find_devices()):
                raise UsageError(f"there are {len(mesh.find_devices())} devices")
        except UsageError as reason:
            print(f"without {name}: {reason}")
            continue
        rows.append([name, *measure_growth(settings, options)])
        jax.clear_caches()
    header = ["doubled twice", "ms", "exponent", "compile s", "exponent", "temporary MB/device", "exponent"]
    print(
        f"{options.preset}: {base.training.batch} x {base.model.seq} tokens a step, "
        f"{format_count(base.model.layers, 'layer')}, d_model {base.model.d_model}, "
        f"mesh {base.parallel.mesh}; {options.describe_turns()}; 1 is proportional\n" + format_table(rows, header)
    )


def measure_growth(settings: list[Config], options: Measuring) -> list[str]:
    """Returns three values and an exponent each for milliseconds, compile seconds and temporary megabytes."""
    contenders, seconds = [], []
    for c in settings:
        start = time.perf_counter()
        contenders.append(ours(c, RepeatedBatch(random_batch(c)), c.parallel.mesh))
        seconds.append(time.perf_counter() - start)
    measure(contenders, options)
    cells = []
    for values in (
        [it.milliseconds for it in contenders],
        seconds,
        [it.temporary_bytes / 1e6 for it in contenders],
    ):
        cells += [" ".join(f"{value:.1f}" for value in values), f"{fit_exponent(FACTORS, values):.2f}"]
    return cells


def fit_exponent(sizes, values) -> float:
    """Returns the slope of a straight line through the logarithms."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])
