"""Devices to a (dp, mp) mesh, and what must be set before the first device is touched."""

import contextlib
import hashlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh

from shardformer.config import Config
from shardformer.errors import RunError, UsageError

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
    join_processes(config)
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


def told_by_any(text: str) -> str:
    """Its own text where a process has one, else that of the first other that has, and which process that is."""
    if jax.process_count() == 1:
        return text
    others = (f"process {process}: {words}" for process, words in enumerate(_texts_of_all(text)) if words)
    return text or next(others, "")


def on_all(act: Callable[[], T]) -> T:
    """What `act` gives, on every process; where it fails on one it fails on all, or the others would wait for ever."""
    found, own = None, None
    try:
        found = act()
    except (RunError, UsageError) as error:
        own = error
    except OSError as error:
        own = RunError(str(error))
    if told := told_by_any(str(own) if own else ""):
        usage = told_by_any("usage" if isinstance(own, UsageError) else "")
        raise own or (UsageError if usage else RunError)(told)
    return found


def on_first(act: Callable[[], object]) -> None:
    """`act` in process 0 alone; the others wait for it, and where it fails it fails on all."""
    on_all(lambda: act() if jax.process_index() == 0 else None)


def of_first_process(text: str) -> str:
    return _texts_of_all(text)[0] if jax.process_count() > 1 else text


def _texts_of_all(text: str) -> list[str]:
    """By process, each cut to 2 kB."""
    padded = np.zeros(2048, np.uint8)
    encoded = np.frombuffer(text.encode()[: padded.size], np.uint8)
    padded[: encoded.size] = encoded
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(padded)]


@contextlib.contextmanager
def nobody_left_waiting() -> Iterator[None]:
    """Where one process of several fails alone, it ends at once: an orderly end would wait for the others' end.

    What all of them hear of are RunErrors and UsageErrors; on those they end together.
    """
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        if jax.process_count() == 1:
            raise
        traceback.print_exc()
        here = f"process {jax.process_index()} of {jax.process_count()}"
        words = str(error)[:500] or type(error).__name__
        print(
            f"shardformer: failed: {here}: {words}. If another process has died, what it printed "
            "says why; start all of them again with train --resume",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def check_same_everywhere(what: str, value: str) -> None:
    """Processes that start out differently would wait for one another for ever, or train nonsense."""
    if jax.process_count() > 1:
        digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
        digests = multihost_utils.process_allgather(digest)
        if (digests != digests[0]).any():
            raise RunError(f"{what} differs between the {jax.process_count()} processes; give all of them the same")


def _cpu_devices(config: Config) -> int:
    """This process's share of the mesh; with mesh=auto one a core, which is the fastest way to use several cores."""
    if config.mesh != "auto":
        _, processes, _ = _processes(config) or ("", 1, 0)
        return -(-config.dp * config.mp // processes)
    cores = min(os.cpu_count() or 1, 8)
    return next(count for count in range(cores, 0, -1) if config.batch % count == 0)


def join_processes(config: Config) -> None:
    """jax.distributed where there are several processes: named by keys, by the environment, or a TPU pod's own."""
    if jax.distributed.is_initialized():
        return
    named = _processes(config)
    if not named and not _on_tpu_vm():
        return
    try:
        jax.distributed.initialize(*named or (), heartbeat_timeout_seconds=config.heartbeat)
    except ValueError:
        if named:
            raise  # else a TPU without a cluster around it: one process
    except RuntimeError as error:
        raise RunError(
            f"jax.distributed could not start: {error}; start the same command on every worker within five minutes"
        ) from None


def _processes(config: Config) -> tuple[str, int, int] | None:
    """(coordinator's address, how many processes, which this is), where the keys or the environment name them."""
    if config.coordinator:
        return config.coordinator, config.processes, config.process_id
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, number, process = (os.environ.get(name, "") for name in names)
    if not address:
        return None
    if not (number.isdecimal() and process.isdecimal() and int(process) < int(number)):
        raise UsageError(
            f"{names[0]}={address} needs {names[1]} and {names[2]}, from 0 to one less, as well; "
            f"got {number!r} and {process!r}"
        )
    return address, int(number), int(process)


def _on_tpu_vm() -> bool:
    """Without touching a device: jax.distributed must come first."""
    if os.environ.get("JAX_PLATFORMS", "tpu").split(",")[0] != "tpu":
        return False
    return "TPU_ACCELERATOR_TYPE" in os.environ or any(map(_is_tpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_tpu(pci_device: Path) -> bool:
    """A PCI device of Google's that is neither a disk (class 01) nor a network card (02)."""
    try:
        vendor, kind = ((pci_device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x1ae0" and not kind.startswith(("0x01", "0x02"))
