"""Makes a mesh of (dp, mp), or of (dp, mp, pp), from devices; sets what must be set before JAX touches the first."""

import contextlib
import math
import os
import sys
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh

from shardformer.config import Config
from shardformer.config.names import AXES
from shardformer.distributed import processes
from shardformer.errors import UsageError
from shardformer.parallel import torus
from shardformer.tables import format_bytes


def use_cpu_devices(count: int, many_in_flight: bool = False) -> None:
    """Makes the CPU appear as `count` devices; call it before any device is touched.

    A user's own XLA_FLAGS or jax_num_cpu_devices win. The devices' collectives wait for one another in a pool of as
    many threads as there are cores, and abort the process when too many programs are in flight. The training loop
    bounds their number; a program that does not needs `many_in_flight`, whose larger pool makes a step up to 1.35
    times slower. The time-outs are long because the machine may be busy with other work.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags and jax.config.jax_num_cpu_devices < 0:
        jax.config.update("jax_num_cpu_devices", count)
    if many_in_flight:
        os.environ.setdefault("NPROC", "64")
    for flag, seconds in (("warn_stuck", 120), ("terminate", 600)):
        name = f"--xla_cpu_collective_call_{flag}_timeout_seconds"
        if name not in flags:
            flags = f"{flags} {name}={seconds}".strip()
    os.environ["XLA_FLAGS"] = flags


def start(
    config: Config,
    needed: Callable[[Config], int] = lambda config: 0,
    say: Callable[[str], None] = print,
    previous: Config | None = None,
    may_add_rows: bool = False,
) -> Config:
    """Joins the other processes, finds the devices, and replaces mesh=auto and accum=auto by what fits them.

    `needed` predicts the bytes that one device of a mesh holds. `previous` is the configuration of a run that is
    resumed: where its mesh does not fit the devices that are here now, it gets another. With `may_add_rows`, as when
    nothing is trained, mesh=auto makes a batch large enough to use every device.
    """
    in_parts = config.accum != 1 and config.accum_mode != "scan"  # a step then dispatches a program per microbatch
    use_cpu_devices(_cpu_devices(config), many_in_flight=in_parts)
    processes.join_processes(config)
    devices, several, rows = find_devices(), jax.process_count() > 1, 0
    virtual = devices[0].platform == "cpu" and not several
    if previous and previous.mesh != "auto":
        rows = previous.batch // (previous.dp * max(previous.accum, 1))
        if config.mesh == previous.mesh:
            config = adapt_to_devices(config, len(devices), several, say)
    if may_add_rows and config.mesh == "auto":
        config = config.replace(batch=-(-config.batch // len(devices)) * len(devices))
    return resolve(config, len(devices), virtual, needed, device_memory(), say, rows)


def adapt_to_devices(config: Config, devices: int, all_of_them: bool, say: Callable[[str], None]) -> Config:
    """The mesh of a run that is resumed on fewer or more devices: another dp where that fits, else mesh=auto."""
    before, *others = map(int, config.mesh.split("x"))
    size = before * math.prod(others)
    if devices == size or (devices % size == 0 and not all_of_them):
        return config
    changed = config.replace(mesh="auto")
    if devices % math.prod(others) == 0:
        with contextlib.suppress(UsageError):
            changed = config.replace(mesh="x".join(map(str, (devices // math.prod(others), *others))))
    hint = "" if config.accum == 0 else "; accum=auto would adapt the microbatches"
    say(
        f"{size} devices before, {devices} now: mesh={config.mesh} becomes mesh={changed.mesh}, "
        f"batch={config.batch} stays{hint}"
    )
    return changed


def find_devices() -> list[jax.Device]:
    """All devices of all processes."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked, words = os.environ.get("JAX_PLATFORMS", ""), (str(error) or "no plugin for it").splitlines()[0]
        raise UsageError(
            f"JAX cannot use the devices that JAX_PLATFORMS={asked} asks for ({words}); unset it, or set it to cpu"
        ) from None


def device_memory() -> float:
    """The bytes of one device, or of the host where its CPU is the devices; infinite where the backend does not say."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


def resolve(
    config: Config,
    devices: int,
    virtual: bool = False,
    needed: Callable[[Config], int] = lambda config: 0,
    available: float = math.inf,
    say: Callable[[str], None] = print,
    rows: int = 0,
) -> Config:
    """`config` with mesh=auto replaced by the shape that uses all devices with the least mp that fits in memory, and
    accum=auto by the fewest microbatches that fit and have at most `rows` rows on a device (0: any number).

    `virtual` devices are those of one CPU: they share its memory, and mesh=auto may use some of them alone.
    """
    if config.mesh != "auto" and config.accum:
        return config
    refused = {}
    for candidate in candidates(config, devices, virtual, rows):
        bytes_needed = needed(candidate) * (candidate.devices if virtual else 1)
        name = candidate.mesh if config.accum else f"{candidate.mesh} accum={candidate.accum}"
        if bytes_needed <= available:
            if refused:
                say(f"{'mesh=auto' if config.accum else 'auto'} took {name}: {_too_large(refused, available)}")
            elif not config.accum:
                at_once = config.batch // candidate.dp // candidate.accum
                say(f"auto took accum={candidate.accum}: {at_once} rows at a time on each device")
            return candidate
        refused[name] = bytes_needed
    if refused:
        raise UsageError(
            f"{_searched(config, devices)} that fits in memory: {_too_large(refused, available)}; take "
            + ("a smaller model" if virtual else "more devices, zero=3 (parameters split over dp) or a smaller model")
        )
    if config.mesh != "auto":
        rows = config.dp * config.pp
        raise UsageError(
            f"{_searched(config, devices)} that pp={config.pp} divides and batch={config.batch} can be cut into; try "
            f"batch={-(-config.batch // rows) * rows}"
        )
    parts = devices * max(config.accum, 1)
    raise UsageError(
        f"mesh=auto finds no dp x mp = {devices} devices with batch={config.batch} divisible by dp * accum "
        f"and heads={config.heads} by mp; try batch={-(-config.batch // parts) * parts}"
    )


def _searched(config: Config, devices: int) -> str:
    if config.mesh == "auto":
        return f"mesh=auto finds no mesh of {devices} devices"
    return f"accum=auto finds no number of microbatches on mesh={config.mesh}"


def candidates(config: Config, devices: int, virtual: bool = False, rows: int = 0) -> Iterator[Config]:
    """The config on every mesh that it allows: the least mp first, and for each the fewest microbatches.

    With ZeRO, which splits over dp, several devices have more than one dp.
    """
    shapes = [config.mesh]
    if config.mesh == "auto":
        least_dp = 2 if config.zero and devices > 1 else 1
        splits = [dp for dp in range(devices, least_dp - 1, -1) if devices % dp == 0]
        shapes = [f"{dp}x{1 if virtual else devices // dp}" for dp in splits]
    for shape in shapes:
        local_rows = max(config.batch // int(shape.partition("x")[0]), 1)
        small = [n for n in range(1, math.isqrt(local_rows) + 1) if local_rows % n == 0]
        divisors = sorted({*small, *(local_rows // n for n in small)})
        for accum in [config.accum] if config.accum else [n for n in divisors if not rows or local_rows // n <= rows]:
            with contextlib.suppress(UsageError):
                yield config.replace(mesh=shape, accum=accum)


def _too_large(refused: dict[str, int], available: float) -> str:
    """'8x1 needs 96.81 GB and 4x2 48.42 GB, of 16.00 GB'."""
    needs = [f"{mesh} needs {format_bytes(count)}" for mesh, count in refused.items()]
    return f"{', '.join(needs)}, and there are {format_bytes(available)}"


def make(config: Config) -> Mesh:
    """The mesh of a resolved config, over this machine's (or pod's) devices.

    Its axes are Auto: arrays made anywhere may enter, and the global view leaves the collectives to XLA.
    """
    devices = find_devices()
    needed, kind = config.devices, f"{len(devices)} {devices[0].platform} devices"
    if len(devices) % needed:
        raise UsageError(
            f"mesh={config.mesh} takes {needed} devices, and that does not divide the {kind} here; try mesh=auto"
        )
    if needed < len(devices) and jax.process_count() > 1:
        raise UsageError(
            f"mesh={config.mesh} takes {needed} devices, and {jax.process_count()} processes must use all of their "
            f"{kind}; try mesh=auto"
        )
    return arrange(config, devices[:needed], follow_wires=needed == len(devices))


def arrange(config: Config, devices: list, follow_wires: bool = True) -> Mesh:
    """Neighbours in the mesh are neighbours on the wire, along mp before pp before dp.

    Of several slices, mp and pp stay within one and dp crosses them.
    """
    (dp, mp, *pp), by_slice = config.mesh_shape, sorted(devices, key=_slice)
    make_mesh = lambda dp_pp_mp: Mesh(dp_pp_mp.swapaxes(1, -1), AXES[: 2 + len(pp)])
    slices = len(set(map(_slice, devices)))
    if dp % slices and devices[0].platform == "tpu":
        fitting = f"{slices}x{len(devices) // slices}"
        raise UsageError(
            f"mesh={config.mesh} has dp={dp}, which does not divide over the {slices} slices of these devices; mp "
            f"cannot leave a slice: try mesh={fitting}, or another with dp a multiple of {slices}"
        )
    try:
        if slices > 1 and dp % slices == 0:
            within, across = (dp // slices, *pp, mp), (slices, *[1 for _ in pp], 1)
            return make_mesh(
                mesh_utils.create_hybrid_device_mesh(within, across, by_slice, allow_split_physical_axes=True)
            )
        if slices == 1 and follow_wires:
            shape, names = (dp, *pp, mp), ("dp", *["pp" for _ in pp], "mp")
            return torus.unroll_ring(make_mesh(jax.make_mesh(shape, names, devices=devices).devices))
    except NotImplementedError:  # no such neighbours: a TPU's physical axes do not factor into this shape
        print(
            f"mesh={config.mesh} does not follow the wires of these devices, so collectives may be slow; another mesh "
            "may be faster",
            file=sys.stderr,
        )
    return make_mesh(np.array(by_slice).reshape(dp, *pp, mp))


def _slice(device) -> int:
    """The number of its TPU slice, or of its group of GPUs that are close to each other."""
    return getattr(device, "slice_index", None) or 0


def _cpu_devices(config: Config) -> int:
    """This process's share of the mesh; with mesh=auto one per core, the fastest way to use several cores."""
    if config.mesh != "auto":
        membership = processes.find_membership(config)
        return -(-config.devices // (membership.count if membership else 1))
    cores = min(os.cpu_count() or 1, 8)
    return next(count for count in range(cores, 0, -1) if config.batch % count == 0)
