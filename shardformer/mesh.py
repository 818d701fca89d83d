"""Devices to a (dp, mp) mesh, and what must be set before the first device is touched."""

import os
from typing import TypeVar

import jax
import numpy as np
from jax.sharding import Mesh

from shardformer import processes
from shardformer.config import Config
from shardformer.errors import UsageError

AXES = ("dp", "mp")
T = TypeVar("T")


def use_cpu_devices(count: int) -> None:
    """Let the CPU appear as `count` devices; call before any device is touched.

    A user's own XLA_FLAGS or jax_num_cpu_devices win. With several devices on few cores, XLA's collectives wait
    for one another in a thread pool as large as the machine, and abort when many steps are in flight: NPROC makes
    the pool large enough, and the time-outs leave room for a machine that is busy with other work.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags and jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", count)
    os.environ.setdefault("NPROC", "64")
    for flag, seconds in (("warn_stuck", 120), ("terminate", 600)):
        name = f"--xla_cpu_collective_call_{flag}_timeout_seconds"
        if name not in flags:
            flags = f"{flags} {name}={seconds}".strip()
    os.environ["XLA_FLAGS"] = flags


def start(config: Config) -> Config:
    """Join the other processes, find the devices, and give `config` a mesh that has a shape."""
    use_cpu_devices(_cpu_devices(config))
    processes.join_processes(config)
    return resolve(config, jax.device_count(), jax.default_backend() == "cpu")


def resolve(config: Config, devices: int, virtual: bool = False) -> Config:
    """`config` with mesh=auto replaced by the shape that uses all devices with the least mp.

    CPU devices are virtual: where the batch does not divide over all of them, fewer do the same work.
    """
    if config.mesh != "auto":
        return config
    for n in (n for n in range(1, devices + 1) if devices % n == 0):
        try:
            return config.replace(mesh=f"{devices // n}x{1 if virtual else n}")
        except UsageError:
            continue
    parts = devices * config.accum
    raise UsageError(
        f"mesh=auto finds no dp x mp = {devices} devices with batch={config.batch} divisible by dp * accum "
        f"and heads={config.heads} by mp; try batch={-(-config.batch // parts) * parts}"
    )


def make(config: Config) -> Mesh:
    """The mesh of a resolved config, over this machine's (or pod's) devices.

    Its axes are Auto: arrays made anywhere may enter, and the global view leaves the collectives to XLA.
    """
    shape, devices = (config.dp, config.mp), jax.devices()
    needed, kind = config.dp * config.mp, f"{len(devices)} {devices[0].platform} devices"
    if len(devices) % needed:
        raise UsageError(
            f"mesh={config.mesh} takes {needed} devices, and that does not divide the {kind} here; try mesh=auto"
        )
    if needed < len(devices) and jax.process_count() > 1:
        raise UsageError(
            f"mesh={config.mesh} takes {needed} devices, and {jax.process_count()} processes must use all of their "
            f"{kind}; try mesh=auto"
        )
    if needed == len(devices):
        try:
            auto = (jax.sharding.AxisType.Auto,) * 2
            return jax.make_mesh(shape, AXES, axis_types=auto)  # neighbours in the mesh are neighbours on the wire
        except NotImplementedError:  # no such neighbours: a TPU's physical axes do not factor into this shape
            pass
    return Mesh(np.array(devices[:needed]).reshape(shape), AXES)


def _cpu_devices(config: Config) -> int:
    """This process's share of the mesh; with mesh=auto one a core, which is the fastest way to use several cores."""
    if config.mesh != "auto":
        _, count, _ = processes.named_processes(config) or ("", 1, 0)
        return -(-config.dp * config.mp // count)
    cores = min(os.cpu_count() or 1, 8)
    return next(count for count in range(cores, 0, -1) if config.batch % count == 0)
