"""`bench checkpoint`: times saves and restores of a training state next to raw np.save and np.load, and Orbax.

The contenders are interleaved in one process. Every round saves, then restores from a warm page cache. With out=URL,
shardformer also saves in that bucket.
"""

import dataclasses
import functools
import gc
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from shardformer import checkpoint, storage
from shardformer.bench.bench_options import Measuring
from shardformer.config import Config
from shardformer.errors import RunError, UsageError
from shardformer.layout import mesh
from shardformer.tables import format_count, format_table
from shardformer.training.trainer import Trainer

MESHES = ("1x1", "4x2")
LAYERS = 12
RESTORE = 0.8  # the least speed relative to raw numpy
VISIBLE = 1.2  # the longest wait of training relative to the copy to the host
COPIES = 4  # of the state in memory at once: numpy's, the devices', the snapshot, and what is restored
HEADER = ["MB", "save s", "of np.save", "loop waits s", "x copy", "restore s", "of np.load", "of device_put"]


class State(NamedTuple):
    """One state three times: in numpy arrays, on the devices, and as abstract arrays for a restore."""

    host: Any
    arrays: Any
    like: Any


class Times(NamedTuple):
    """The seconds of one round; NaN for an operation that a contender lacks."""

    save: float
    waits: float  # the part of `save` that blocks the training loop
    restore: float


@dataclasses.dataclass
class Contender:
    """A method to store a state. `save` returns how long it blocks the loop; `restore` returns the arrays."""

    name: str
    save: Callable[[Path], float]
    restore: Callable[[Path], Any] | None = None
    clean_up: Callable[[Path], None] = lambda _: None
    times: list[Times] = dataclasses.field(default_factory=list)

    def measure(self, state: State) -> Times:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "saved"
            waits, save = timed(lambda: self.save(path), state)
            if self.restore is None:
                return Times(save, waits, np.nan)
            restored, restore = timed(functools.partial(_restore_and_wait, self.restore, path), state)
            self.clean_up(path)
            if not self.times and not same(restored, state.host):
                raise RunError(f"{self.name} restored other values than it saved")
            return Times(save, waits, restore)

    def median(self, field: str) -> float:
        return float(np.median([getattr(round, field) for round in self.times]))

    def ratio(self, base: "Contender", field: str) -> float:
        """Returns the median over rounds of the time relative to `base`."""
        pairs = zip(self.times, base.times, strict=True)
        return float(np.median([getattr(ours, field) / getattr(theirs, field) for ours, theirs in pairs]))


def bench_checkpoint(options: Measuring, base: Config) -> None:
    """Prints a table for each mesh that fits the devices."""
    if base.run.out and not storage.is_url(base.run.out):
        raise UsageError(f"out={base.run.out} is on a disk; out names a bucket to save in as well, TMPDIR the disk")
    mesh.use_cpu_devices(8)
    check_room(options.mb)
    print(
        f"a TrainState of random float32 on {jax.devices()[0].device_kind}; "
        f"medians of {format_count(options.rounds, 'turn')}\n"
        f"in {tempfile.gettempdir()} (TMPDIR chooses). np.save and shardformer wait for the disk, Orbax as it comes; "
        "all restores\nread from a warm page cache, np.load into host memory, the others onto the devices. "
        "`of`: times as fast as that"
    )
    for shape in MESHES:
        try:
            print(report(sized(base.replace(mesh=shape), options.mb), options.rounds, base.run.out))
        except UsageError as reason:
            print(f"without {shape}: {reason}")


def check_room(megabytes: int) -> None:
    """Raises UsageError unless the disk and, as far as Linux knows it, the memory have room for a state."""
    free = shutil.disk_usage(tempfile.gettempdir()).free // 10**6
    if 2 * megabytes > free:  # a restore may still hold the files of a save
        raise UsageError(
            f"mb={megabytes} needs {2 * megabytes:,} MB of disk, and {tempfile.gettempdir()} has {free:,} MB free; "
            f"try mb={free // 2}, or set TMPDIR to a larger disk"
        )
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 10**6
    if COPIES * megabytes > memory:
        raise UsageError(
            f"mb={megabytes} needs {COPIES * megabytes:,} MB of memory, and this machine has {memory:,} MB; "
            f"try mb={memory // COPIES}"
        )


def sized(c: Config, megabytes: int) -> Config:
    """Chooses the width for parameters and two moments of that size: a layer has about 12 d_model^2 weights."""
    width = (megabytes * 1e6 / np.dtype(np.float32).itemsize / 3 / 12 / LAYERS) ** 0.5
    return c.replace(layers=LAYERS, heads=4, d_ff=None, d_model=max(8, 8 * round(width / 8)))


def report(c: Config, rounds: int, out: str = "") -> str:
    if c.parallel.devices > len(mesh.find_devices()):
        raise UsageError(f"there are {len(mesh.find_devices())} devices")
    state = make_state(Trainer(c, mesh.make(c)).abstract)
    raw, placed = raw_numpy(state, "np.save, np.load"), raw_numpy(state, "np.load, device_put", place=True)
    copy, ours = copy_alone(state), shardformer(state)
    contenders = [raw, placed, copy, ours, *([shardformer(state, out)] if out else [])]
    missing = ""
    try:
        contenders.append(orbax(state))
    except ImportError:
        missing = "\nwithout Orbax: it is not installed; pip install orbax-checkpoint"
    for number in range(rounds + 1):
        for contender in contenders:
            times = contender.measure(state)
            if number:  # the first also starts threads and compiles
                contender.times.append(times)
    size = sum(leaf.nbytes for leaf in jax.tree.leaves(state.host)) / 1e6
    rows = [[it.name, f"{size:.0f}", *cells(it, raw, placed, copy)] for it in contenders]
    # np.load fills memory once, and with dp most leaves are on two or more devices.
    summary = verdict(ours, raw if c.parallel.dp == 1 else placed, copy)
    return f"{format_table(rows, [f'mesh {c.parallel.mesh}', *HEADER])}{missing}\n{summary}"


def cells(it: Contender, raw: Contender, placed: Contender, copy: Contender) -> list[str]:
    def speed(base: Contender, field: str) -> str:
        return f"{1 / it.ratio(base, field):.2f}"

    waits = [f"{it.median('waits'):.3f}", f"{it.ratio(copy, 'waits'):.2f}"]
    if it is copy:
        return ["-", "-", *waits, "-", "-", "-"]
    restore = [f"{it.median('restore'):.3f}", speed(raw, "restore"), speed(placed, "restore")]
    return [f"{it.median('save'):.3f}", speed(raw, "save"), *waits, *restore]


def verdict(ours: Contender, raw: Contender, copy: Contender) -> str:
    speed, waits = 1 / ours.ratio(raw, "restore"), ours.ratio(copy, "waits")
    restores, blocks = ("as wanted" if met else "too slow" for met in (speed >= RESTORE, waits <= VISIBLE))
    return (
        f"restore {speed:.2f} x the speed of {raw.name} ({restores}: {RESTORE} or more); the loop waits "
        f"{waits:.2f} x the copy alone ({blocks}: {VISIBLE} or less)"
    )


def _restore_and_wait(restore: Callable[[Path], Any], path: Path):
    return jax.block_until_ready(restore(path))


def make_state(like) -> State:
    random = np.random.default_rng(0)

    def fill(leaf):
        if leaf.dtype == np.float32:
            return random.standard_normal(leaf.shape, leaf.dtype)
        return np.zeros(leaf.shape, leaf.dtype)

    host = jax.tree.map(fill, like)
    arrays = jax.tree.map(lambda leaf, abstract: jax.device_put(leaf, abstract.sharding), host, like)
    return State(host, jax.block_until_ready(arrays), like)


def raw_numpy(state: State, name: str, place: bool = False) -> Contender:
    """Stores all arrays in one file, without names, checksums or a background thread."""

    def save(path: Path) -> float:
        start = time.perf_counter()
        with open(path, "wb") as file:
            for leaf in jax.tree.leaves(state.host):
                np.save(file, leaf, allow_pickle=False)
            file.flush()
            os.fsync(file.fileno())
        return time.perf_counter() - start

    def restore(path: Path):
        with open(path, "rb") as file:

            def load(like):
                array = np.load(file)
                return jax.device_put(array, like.sharding) if place else array

            return jax.tree.map(load, state.like)

    return Contender(name, save, restore)


def copy_alone(state: State) -> Contender:
    """Copies each slice once to separate host memory."""

    def save(_: Path) -> float:
        shards = [shard for leaf in jax.tree.leaves(state.arrays) for shard in leaf.addressable_shards]
        slices = [twin(shard.data) for shard in shards if shard.replica_id == 0]
        start = time.perf_counter()
        for piece in slices:
            piece.copy_to_host_async()
        copies = [np.array(piece) if jax.default_backend() == "cpu" else np.asarray(piece) for piece in slices]
        return time.perf_counter() - start if copies else np.nan

    return Contender("copy to the host alone", save)


def shardformer(state: State, bucket: str = "") -> Contender:
    """Saves in the round's folder, or in a bucket folder of the same name."""

    def folder(path: Path):
        return storage.location(bucket) / f"bench-{path.parent.name}" if bucket else path

    def save(path: Path) -> float:
        saver = checkpoint.Saver(folder(path))
        start = time.perf_counter()
        saver.save(0, checkpoint.take_snapshot(state.arrays), {})
        waits = time.perf_counter() - start
        saver.wait()
        saver.close()
        return waits

    def restore(path: Path):
        return checkpoint.restore(checkpoint.step_folder(folder(path), 0), state.like)

    name = f"shardformer, {bucket}" if bucket else "shardformer"
    return Contender(name, save, restore, lambda path: checkpoint.prune(folder(path), keep=0, also=set()))


def orbax(state: State) -> Contender:
    import orbax.checkpoint

    checkpointer = orbax.checkpoint.StandardCheckpointer()

    def save(path: Path) -> float:
        start = time.perf_counter()
        checkpointer.save(path, state.arrays)
        waits = time.perf_counter() - start
        checkpointer.wait_until_finished()
        return waits

    return Contender("Orbax", save, lambda path: checkpointer.restore(path, state.like))


def twin(data: jax.Array) -> jax.Array:
    """Returns an alias without the cached host copy that an array keeps."""
    return jax.make_array_from_single_device_arrays(data.shape, data.sharding, [data])


def timed(function: Callable[[], Any], state: State) -> tuple[Any, float]:
    """Times a function after touching memory: a virtual machine takes ten times as long to find memory as to copy."""
    gc.collect()
    leaves = jax.tree.leaves(state.arrays)
    np.ones(sum(leaf.nbytes + sum(shard.data.nbytes for shard in leaf.addressable_shards) for leaf in leaves), np.uint8)
    start = time.perf_counter()
    return function(), time.perf_counter() - start


def same(restored, host) -> bool:
    return jax.tree.all(jax.tree.map(lambda got, saved: np.array_equal(np.asarray(got), saved), restored, host))
