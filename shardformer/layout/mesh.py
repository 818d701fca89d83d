"""The mesh of the devices, and the settings that must precede the first use of a device."""

import contextlib
import math
import os
from collections.abc import Callable, Iterator

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh

from shardformer.config import Config
from shardformer.config.model_keys import ModelKeys
from shardformer.config.names import AXES, DP, MP
from shardformer.config.parsing import parse_mesh
from shardformer.devices import gpu, processes, programs
from shardformer.devices.chips import CPU, describe_hardware
from shardformer.errors import UsageError
from shardformer.layout import choices, torus
from shardformer.layout.choices import Layout
from shardformer.messages import log
from shardformer.tables import format_bytes, format_count

# A CPU's step with more parameters per token is faster with mp: with dp, each device updates all. See bench/README.md.
MOST_PARAMETERS_PER_TOKEN = 20_000


def use_cpu_devices(count: int, many_in_flight: bool = False) -> None:
    """Makes the CPU appear as `count` devices, unless XLA_FLAGS or jax_num_cpu_devices already do.

    Call it before the first use of a device. Collectives of these devices wait for one another in a pool with a thread
    per core, and abort the process if too many programs are in flight. The training loop bounds their number. Other
    programs need `many_in_flight`, whose larger pool makes a step up to 1.35 times slower. The time-outs are long for
    busy machines.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    configured = jax.config.jax_num_cpu_devices  # type: ignore[attr-defined]  # JAX defines it at run time
    if "xla_force_host_platform_device_count" not in flags and configured < 0:
        _configure_cpu_devices(count)
    if many_in_flight:
        os.environ.setdefault("NPROC", "64")
    for flag, seconds in (("warn_stuck", 120), ("terminate", 600)):
        name = f"--xla_cpu_collective_call_{flag}_timeout_seconds"
        if name not in flags:
            flags = f"{flags} {name}={seconds}".strip()
    os.environ["XLA_FLAGS"] = flags


def _configure_cpu_devices(count: int) -> None:
    try:
        jax.config.update("jax_num_cpu_devices", count)
    except RuntimeError:  # a program of the user's has asked for the devices before
        devices = jax.devices()
        if devices[0].platform == "cpu" and len(devices) < count:
            message = f"JAX has started with {format_count(len(devices), 'CPU device')}, and {count} are needed; "
            message += f'restart Python with jax.config.update("jax_num_cpu_devices", {count}), before jax.devices()'
            raise UsageError(message) from None


def start(
    config: Config,
    needed: Callable[[Config], int] = lambda config: 0,
    previous: Config | None = None,
    may_add_rows: bool = False,
) -> Config:
    """Joins the other processes, finds the devices, and replaces mesh=auto and accum=auto by values that fit.

    `needed` predicts the bytes on one device of a mesh. `previous` is the configuration of a resumed run, whose
    mesh is adapted to the devices. With `may_add_rows`, mesh=auto enlarges the batch so that it uses every device;
    commands that do not train pass it.
    """
    # A step in parts dispatches a program per microbatch.
    in_parts = config.training.accum != 1 and config.training.accum_mode != "scan"
    gpu.prepare()
    use_cpu_devices(_cpu_devices(config), many_in_flight=in_parts)
    processes.join_processes(config)
    devices, distributed, rows = find_devices(), jax.process_count() > 1, 0
    virtual = devices[0].platform == "cpu" and not distributed
    if previous and previous.parallel.mesh != "auto":
        rows = previous.microbatch_rows
        if config.parallel.mesh == previous.parallel.mesh:
            from shardformer.layout.other_devices import adapt_to_devices  # not imported for a new run

            config = adapt_to_devices(config, len(devices), distributed)
    if may_add_rows and config.parallel.mesh == "auto":
        config = config.replace(batch=-(-config.training.batch // len(devices)) * len(devices))
    return choose_mesh(config, len(devices), virtual, needed, device_memory(), rows)


def find_devices() -> list[jax.Device]:
    """Returns all devices of all processes."""
    try:
        return jax.devices()
    except (RuntimeError, AssertionError) as error:
        asked, reason = os.environ.get("JAX_PLATFORMS", ""), (str(error) or "no plugin for it").splitlines()[0]
        raise UsageError(
            f"JAX cannot use the devices that JAX_PLATFORMS={asked} asks for ({reason}); unset it, or set it to cpu"
        ) from None


def device_memory() -> float:
    """Returns the bytes of one device, or of the host for CPU devices; infinite if the backend does not report them."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return (device.memory_stats() or {}).get("bytes_limit", math.inf)


def choose_mesh(
    config: Config,
    devices: int,
    virtual: bool = False,
    needed: Callable[[Config], int] = lambda config: 0,
    available: float = math.inf,
    rows: int = 0,
) -> Config:
    """Replaces mesh=auto and accum=auto.

    The mesh uses all devices with the least mp that fits in memory. accum is the least number of microbatches that fit
    and have at most `rows` rows on a device (0: any number). `virtual` devices belong to one CPU: they share its
    memory, and mesh=auto may use only some of them.
    """
    if config.parallel.mesh != "auto" and config.training.accum:
        return config
    too_large: dict[str, int] = {}
    for candidate in candidates(config, devices, virtual, rows):
        bytes_needed = needed(candidate) * (candidate.parallel.devices if virtual else 1)
        name = candidate.parallel.mesh + ("" if config.training.accum else f" accum={candidate.training.accum}")
        if bytes_needed <= available:
            if too_large:
                asked = "mesh=auto" if config.training.accum else "auto"
                log.info(f"{asked} took {name}: {_format_needs(too_large, available)}")
            elif not config.training.accum:
                rows_at_once = format_count(candidate.microbatch_rows, "row")
                log.info(f"auto took accum={candidate.training.accum}: {rows_at_once} at a time on each device")
            return candidate
        too_large[name] = bytes_needed
    if too_large:
        raise UsageError(
            f"{_searched(config, devices)} that fits in memory: {_format_needs(too_large, available)}; take "
            + ("a smaller model" if virtual else "more devices, zero=3 (parameters split over dp) or a smaller model")
        )
    if config.parallel.mesh != "auto":
        rows = config.parallel.dp * config.parallel.pp
        raise UsageError(
            f"accum=auto on mesh={config.parallel.mesh} needs a batch that dp * pp = {rows} divides; got "
            f"batch={config.training.batch}, try batch={-(-config.training.batch // rows) * rows}"
        )
    parts = devices * max(config.training.accum, 1)
    raise UsageError(
        f"mesh=auto finds no dp x mp = {devices} devices with batch={config.training.batch} divisible by dp * accum "
        f"and heads={config.model.heads} by mp; try batch={-(-config.training.batch // parts) * parts}"
    )


def _searched(config: Config, devices: int) -> str:
    if config.parallel.mesh == "auto":
        return f"mesh=auto finds no mesh of {devices} devices"
    return f"accum=auto finds no number of microbatches on mesh={config.parallel.mesh}"


def candidates(config: Config, devices: int, virtual: bool = False, rows: int = 0) -> Iterator[Config]:
    """Yields the config on every valid mesh: the least mp first, and for each mesh the fewest microbatches.

    Virtual devices have no mp, or mp alone first where that is faster. With ZeRO, several devices have a dp above 1.
    """
    shapes = [config.parallel.mesh]
    if config.parallel.mesh == "auto":
        least_dp = 2 if config.parallel.zero and devices > 1 else 1
        splits = [dp for dp in range(devices, least_dp - 1, -1) if devices % dp == 0]
        shapes = [f"{dp}x{1 if virtual else devices // dp}" for dp in splits]
        if virtual:
            shapes[:0] = [f"1x{mp}" for mp in _cpu_mp(config, devices) if devices % mp == 0]
    for shape in shapes:
        local_rows = max(config.training.batch // parse_mesh(shape).dp, 1)
        small = [n for n in range(1, math.isqrt(local_rows) + 1) if local_rows % n == 0]
        divisors = sorted({*small, *(local_rows // n for n in small)})
        for accum in (
            [config.training.accum]
            if config.training.accum
            else [n for n in divisors if not rows or local_rows // n <= rows]
        ):
            with contextlib.suppress(UsageError):
                yield config.replace(mesh=shape, accum=accum)


def _format_needs(too_large: dict[str, int], available: float) -> str:
    """Formats the bytes that each mesh needs and the bytes that are available."""
    needs = [f"{mesh} needs {format_bytes(count)}" for mesh, count in too_large.items()]
    return f"{', '.join(needs)}, and there are {format_bytes(available)}"


def make(config: Config) -> Mesh:
    """Makes the mesh of a resolved config over the devices of this machine or pod.

    Its axes are Auto: arrays from anywhere may enter, and in the global view XLA inserts the collectives.
    """
    devices = find_devices()
    programs.reject_unsafe_cache(config, devices[0].platform)
    needed, kind = config.parallel.devices, format_count(len(devices), f"{devices[0].platform} device")
    if len(devices) % needed:
        raise UsageError(
            f"mesh={config.parallel.mesh} takes {needed} devices, and that does not divide the {kind} here; try "
            "mesh=auto"
        )
    if needed < len(devices) and jax.process_count() > 1:
        raise UsageError(
            f"mesh={config.parallel.mesh} takes {needed} devices, and {jax.process_count()} processes must use all "
            f"of their {kind}; try mesh=auto"
        )
    return arrange(config, devices[:needed], follow_wires=needed == len(devices))


def resolve_on(config: Config, mesh: Mesh | AbstractMesh) -> Layout:
    """Returns the layout for this mesh's devices, or for CPUs if it is abstract: no kernel can be traced there."""
    hardware = CPU if isinstance(mesh, AbstractMesh) else describe_hardware(mesh.devices.flat[0])
    return choices.resolve(config, hardware, torus.factor_dp(mesh))


def arrange(config: Config, devices: list, follow_wires: bool = True) -> Mesh:
    """Makes neighbours in the mesh neighbours on the wire, along mp before cp before pp before dp.

    mp, cp and pp stay within a slice; only dp crosses slices.
    """
    (dp, mp, *between), by_slice = config.parallel.mesh_shape, sorted(devices, key=_slice)
    axes = AXES[: len(config.parallel.mesh_shape)]

    def make_mesh(mp_last: np.ndarray) -> Mesh:
        return Mesh(np.moveaxis(mp_last, -1, 1), axes)

    slices = len(set(map(_slice, devices)))
    if dp % slices and devices[0].platform == "tpu":
        fitting = f"{slices}x{len(devices) // slices}"
        raise UsageError(
            f"mesh={config.parallel.mesh} has dp={dp}, which does not divide over the {slices} slices of these "
            f"devices; mp cannot leave a slice: try mesh={fitting}, or another with dp a multiple of {slices}"
        )
    try:
        if slices > 1 and dp % slices == 0:
            within, across = (dp // slices, *between, mp), (slices, *[1 for _ in between], 1)
            return make_mesh(
                mesh_utils.create_hybrid_device_mesh(within, across, by_slice, allow_split_physical_axes=True)
            )
        if slices == 1 and follow_wires:
            shape, names = (dp, *between, mp), (DP, *axes[2:], MP)
            return torus.unroll_ring(make_mesh(jax.make_mesh(shape, names, devices=devices).devices))
    except NotImplementedError:  # no neighbours of this shape: a TPU's physical axes do not factor into this shape
        log.warning(
            f"mesh={config.parallel.mesh} does not follow the wires of these devices, so collectives may be slow; "
            "another mesh may be faster"
        )
    return make_mesh(np.array(by_slice).reshape(dp, *between, mp))


def _slice(device) -> int:
    """Returns the number of a device's TPU slice, or of its group of connected GPUs."""
    return getattr(device, "slice_index", None) or 0


def _cpu_devices(config: Config) -> int:
    """Returns this process's share of the mesh; with mesh=auto one per core, or fewer that fit the model or batch."""
    membership = processes.find_membership(config)
    together = membership.processes if membership else 1
    if config.parallel.mesh != "auto":
        return -(-config.parallel.devices // together)
    cores = min(os.cpu_count() or 1, 8)
    fitting = _cpu_mp(config, cores) if together == 1 else []
    return (fitting or [count for count in range(cores, 0, -1) if config.training.batch % count == 0])[0]


def _cpu_mp(config: Config, most: int) -> list[int]:
    """Returns each valid mp, the largest first, if a step has so few tokens that it is faster with mp than with dp."""
    model, fitting = config.model, []
    parameters = model.layers * count_matrix_elements(model) + model.d_model * model.vocab
    few_tokens = parameters > MOST_PARAMETERS_PER_TOKEN * config.training.batch * model.seq
    if few_tokens and not (config.parallel.zero or config.lora.lora_rank):
        for mp in range(most, 1, -1):
            with contextlib.suppress(UsageError):
                config.replace(mesh=f"1x{mp}")
                fitting.append(mp)
    return fitting


def count_matrix_elements(model: ModelKeys) -> int:
    """Returns the elements of a dense layer's matrices, or a few more."""
    return 4 * model.heads * model.head_size * model.d_model + 3 * model.d_model * model.ff_size


def make_abstract(config: Config) -> AbstractMesh:
    """Returns the config's mesh without devices, for tracing."""
    names = AXES[: len(config.parallel.mesh_shape)]
    return AbstractMesh(config.parallel.mesh_shape, names, axis_types=(AxisType.Auto,) * len(names))
