"""`bench accumulation`: what cutting a batch costs and saves, by each way to do it; `bench zero`: bytes on a device."""

import time

import jax
import numpy as np

from shardformer import mesh, parsing
from shardformer.config import Config
from shardformer.report.bench import Contender, Measuring, make_batch, measure
from shardformer.tables import table
from shardformer.train import Trainer

PARTS = (1, 4, 16)
BATCH = 64  # a preset's own may not divide into 16


def accumulation(options: Measuring, base: Config) -> None:
    """Time, memory for activations and time to compile of a step, for each way to accumulate."""
    base = mesh.start(base)
    if base.batch % (base.dp * max(PARTS)):
        base = base.replace(batch=BATCH * base.dp)
    batch, contenders, rows = make_batch(base), [], []
    for parts in PARTS:
        for mode in ("scan", "multisteps", "manual") if parts > 1 else ("scan",):
            trainer = Trainer(c := base.replace(accum=parts, accum_mode=mode), mesh.make(base))
            start = time.perf_counter()
            programs = [lowered.compile() for lowered in trainer.lowered(trainer.init(), batch)]
            seconds = time.perf_counter() - start
            temporary = max(program.memory_analysis().temp_size_in_bytes for program in programs)
            advance = lambda state, number, trainer=trainer: trainer.step(state, batch, number)
            contenders.append(Contender(mode, c.dp * c.mp, advance, trainer.init(), None))
            rows.append([mode if parts > 1 else "whole", str(parts), f"{temporary / 1e6:.1f}", f"{seconds:.1f}"])
    measure(contenders, options)
    for row, contender in zip(rows, contenders, strict=True):
        row += [f"{np.median(contender.turns):.1f}", f"{contender.speed(contenders[0]):.2f}"]
    print(
        f"{options.preset}: {base.batch} x {base.seq} tokens a step, mesh {base.mesh}, on "
        f"{jax.devices()[0].device_kind}; medians of {options.rounds} turns of {options.turn} steps\n"
        + table(rows, ["accum_mode", "accum", "temporary MB/device", "compile s", "ms", "speed"])
    )


def zero(options: Measuring, base: Config) -> None:
    """Bytes of the parameters and of the optimizer's state on one device, counted in live arrays."""
    mesh.use_cpu_devices(max(8, base.dp * base.mp))
    rows = []
    for shape in ("8x1", "4x2") if base.dp * base.mp == 1 else (base.mesh,):
        for level in (0, 1, 3):
            c = base.replace(mesh=shape, zero=level, batch=parsing.mesh(shape)[0], accum=1)
            trainer = Trainer(c, mesh.make(c))
            state = trainer.init()
            row = [shape, str(level)]
            for tree, split in ((state.params, level == 3), (state.optimizer, level > 0)):
                whole = sum(leaf.nbytes for leaf in jax.tree.leaves(tree))
                ideal = whole / c.mp / (c.dp if split else 1)
                held = held_bytes(tree)
                row += [f"{held / 1e6:.3f}", f"{ideal / 1e6:.3f}", f"{held / ideal:.3f}"]
            rows.append([*row, ", ".join(trainer.model.not_scattered) or "-"])
    columns = ["parameters MB", "ideal", "ratio", "optimizer MB", "ideal", "ratio"]
    print(
        f"{options.preset}, of one device; ideal: all of it by mp, and by dp where zero splits it\n"
        + table(rows, ["mesh", "zero", *columns, "whole on every dp"])
    )


def held_bytes(tree) -> int:
    """Of the first device, or of the one that holds most."""
    by_device = {}
    for leaf in jax.tree.leaves(tree):
        for shard in leaf.addressable_shards:
            by_device[shard.device] = by_device.get(shard.device, 0) + shard.data.nbytes
    return max(by_device.values())
