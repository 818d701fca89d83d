"""One process of several: `python -m tests.checkpoint.group PROCESS PROCESSES PORT OUT WHAT ...`.

It saves a made-up training state on each mesh, and restores what the other groups saved on meshes of its own.
"""

import errno
import functools
import os
import sys
import time
import tracemalloc
import zlib
from pathlib import Path

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint
from shardformer.checkpoint import manifest
from shardformer.config import Config
from shardformer.errors import RunError
from shardformer.layout import mesh
from shardformer.training.trainer import Trainer
from tests import shared

COUNTS = (1, 2, 4)
DEVICES = 8


def saved(out: Path, processes: int, name: str) -> Path:
    """Returns the checkpoint that a group saved on a mesh."""
    return checkpoint.step_folder(out / f"by_{processes}", shared.MESHES.index(name))


def target(processes: int, saved_by: int, name: str) -> str:
    """Chooses a mesh so that all pairs of groups, of a group and a mesh, and of two meshes occur."""
    turn = COUNTS.index(processes) + COUNTS.index(saved_by)
    return shared.MESHES[(shared.MESHES.index(name) + turn) % 4]


def level(processes: int, name: str) -> int:
    """Returns the ZeRO level of a group and a mesh; each group and each mesh meets all levels."""
    return (0, 1, 3)[(COUNTS.index(processes) + shared.MESHES.index(name)) % 3]


@functools.cache
def abstract(name: str, **overrides):
    """Scanned or not, split over dp or not, a checkpoint is the same."""
    settings = shared.tiny(mesh=name, layers=1, scan=name != "4x2", **overrides)
    return Trainer(settings, mesh.make(settings)).abstract


def value(name: str, like) -> np.ndarray:
    bits = np.random.default_rng(zlib.crc32(name.encode()))
    return bits.integers(0, 2**31, like.shape).astype(np.int32).view(like.dtype).reshape(like.shape)


def made_up(like):
    def make(name: str, leaf) -> jax.Array:
        return jax.make_array_from_callback(leaf.shape, leaf.sharding, lambda index: np.array(value(name, leaf)[index]))

    return manifest.unflatten(like, {name: make(name, leaf) for name, leaf in manifest.flatten(like).items()})


def save_on_every_mesh(out: Path) -> None:
    for name in shared.MESHES:
        folder = saved(out, jax.process_count(), name)
        checkpoint.save(
            folder.parent, shared.MESHES.index(name), made_up(abstract(name, zero=level(jax.process_count(), name))), {}
        )


def restore_all(out: Path) -> None:
    """Restores the checkpoints of every group as they appear, and compares them bitwise."""
    wanted = [(count, name) for count in COUNTS for name in shared.MESHES]
    deadline = time.monotonic() + 600
    while not all(saved(out, *each).exists() for each in wanted) and time.monotonic() < deadline:
        time.sleep(0.1)
    for count, name in wanted:
        to, processes = target(jax.process_count(), count, name), jax.process_count()
        like = abstract(to, zero=level(processes, to))
        for leaf_name, leaf in manifest.flatten(checkpoint.restore(saved(out, count, name), like)).items():
            expected = value(leaf_name, leaf)
            for shard in leaf.addressable_shards:
                assert np.asarray(shard.data).tobytes() == expected[shard.index].tobytes(), (count, name, leaf_name)
    print(f"restored {len(wanted)}")


def restore_within_bounds(out: Path) -> None:
    """The host's memory holds this process's share and one leaf, on whatever mesh it was saved."""
    leaf_bytes = 2**23
    shapes = {f"leaf{i}": (1024, leaf_bytes // 4096) for i in range(6)}

    def like(mesh, spec):
        sharding = NamedSharding(mesh, spec)
        return {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name, shape in shapes.items()}

    def on(config):
        return mesh.make(shared.tiny(mesh=config))

    folder = checkpoint.save(out / "bounds", 1, made_up(like(on("2x4"), P("mp"))), {})
    tracemalloc.start()
    restored = checkpoint.restore(folder, like(on("4x2"), P(None, ("dp", "mp"))))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    share = len(shapes) * leaf_bytes // jax.process_count()
    assert share < peak < share + 1.25 * leaf_bytes, (peak, share)
    assert len(restored) == len(shapes)
    print("within bounds")


def fail_as_one(out: Path) -> None:
    """Whoever cannot write, all hear of it, and the next save is as good as any."""
    state, fsync = made_up(abstract("4x2")), os.fsync
    (out / "failing").mkdir(exist_ok=True)

    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    for step, broken in enumerate(((0,), (1,), (0, 1)), start=1):
        os.fsync = full if jax.process_index() in broken else fsync
        try:
            checkpoint.save(out / "failing", step, state, {})
        except RunError as error:
            print(f"refused {broken}: {error}")
        os.fsync = fsync
    checkpoint.save(out / "failing", 4, state, {})


def main() -> None:
    process, processes, port = map(int, sys.argv[1:4])
    mesh.use_cpu_devices(DEVICES // processes)
    settings = {"coordinator": f"localhost:{port}", "processes": processes, "process_id": process}
    mesh.start(Config.of(mesh="8x1", batch=8, **settings))
    for what in sys.argv[5:]:
        globals()[what](Path(sys.argv[4]))


if __name__ == "__main__":
    main()
