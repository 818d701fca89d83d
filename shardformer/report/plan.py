"""What a step costs on given chips before one has them: bytes, collectives, time, and whether it fits."""

import itertools
from collections.abc import Iterator
from typing import NamedTuple

from shardformer import mesh
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.report import collectives, compiling, memory, roofline
from shardformer.report.chips import Slice
from shardformer.report.compiling import CompiledStep
from shardformer.report.memory import DeviceBytes
from shardformer.report.roofline import Roofline
from shardformer.tables import format_bytes, format_table

MARGIN = 1.1  # of an estimate, for a setting that is proposed
CPU_DEVICES = 16  # most that a CPU compile pretends to have


class Plan(NamedTuple):
    config: Config
    chips: Slice
    held: DeviceBytes
    temporaries: int  # estimated
    compiled: CompiledStep | None
    times: Roofline | None

    @property
    def bytes(self) -> int:
        """Of one device: as compiled for this chip, else as estimated."""
        if self.compiled and self.compiled.compiler == "libtpu" and not self.compiled.refused:
            return self.compiled.bytes
        return self.estimate

    @property
    def estimate(self) -> int:
        return self.held.total + self.temporaries

    @property
    def fits(self) -> bool:
        refused = self.compiled is not None and bool(self.compiled.refused)
        return not refused and self.bytes <= self.chips.chip.memory

    @property
    def tokens_per_second(self) -> float:
        return self.config.batch * self.config.seq / self.times.seconds if self.times else 0.0

    @property
    def utilization(self) -> float:
        """Model FLOPs over the chips' peak (MFU)."""
        devices = self.config.devices
        return self.tokens_per_second * roofline.flops_per_token(self.config) / (devices * self.chips.chip.flops)


def resolve(config: Config, chips: Slice) -> Config:
    """mesh=auto as the shape with the least mp that is estimated to fit, or else with the most."""
    if config.mesh != "auto":
        if config.devices != chips.count:
            fitting = next(_meshes(config.replace(mesh="auto"), chips))
            raise UsageError(
                f"mesh={config.mesh} takes {config.devices} devices, and chip={chips} has {chips.count}; "
                f"try mesh={fitting.mesh}"
            )
        return config
    shapes = list(_meshes(config, chips))
    return next((c for c in shapes if _estimate(c) * MARGIN <= chips.chip.memory), shapes[-1])


def _meshes(config: Config, chips: Slice) -> Iterator[Config]:
    """All shapes of the slice that the config allows, the least mp first."""
    found = list(mesh.candidates(config, chips.count))
    if not found:
        parts = chips.count * config.accum
        raise UsageError(
            f"no mesh of {chips.count} devices fits batch={config.batch} and heads={config.heads}; try "
            f"batch={-(-config.batch // parts) * parts}"
        )
    yield from found


def make_plan(config: Config, chips: Slice, compile_with: str = "auto") -> Plan:
    held, temporaries = memory.predict_bytes(config), memory.estimate_temporaries(config)
    compiled = _compile(config, chips, compile_with)
    times = None
    if compiled and compiled.collectives is not None:
        times = roofline.predict_times(config, chips, held.total + temporaries, compiled.collectives)
    return Plan(config, chips, held, temporaries, compiled, times)


def _compile(config: Config, chips: Slice, compiler: str) -> CompiledStep | None:
    if compiler == "none":
        return None
    if chips.is_tpu and compiler in ("auto", "libtpu") and (compiler == "libtpu" or compiling.has_libtpu()):
        return compiling.compile_step(config, compiling.tpu_mesh(config, chips), "libtpu")
    if compiler == "auto" and chips.count > CPU_DEVICES:
        return None
    mesh.use_cpu_devices(chips.count)
    return compiling.compile_step(config, mesh.make(config), "cpu")


def _estimate(config: Config) -> int:
    return memory.predict_bytes(config).total + memory.estimate_temporaries(config)


def propose(plan: Plan) -> Config | None:
    """The nearest settings that are estimated to fit: first another mesh, then ZeRO, remat and microbatches."""
    config = plan.config
    limit = plan.chips.chip.memory
    full = {"remat": "full"}
    extras = [{}, {"zero": 1}, {"zero": 3}, full, full | {"zero": 1}, full | {"zero": 3}]
    extras += [full | {"zero": 3, "accum": config.accum * n} for n in (2, 4, 8, 16)]
    for changes in extras:
        try:
            changed = config.replace(**{"mesh": "auto"} | changes)
            shapes = list(_meshes(changed, plan.chips))
        except UsageError:
            continue
        for candidate in shapes:
            held = memory.predict_bytes(candidate).total  # cheaper than the rest
            if candidate != config and held <= limit and _estimate(candidate) * MARGIN <= limit:
                return candidate
    return None


def sweep(config: Config, chips: Slice) -> list[Plan]:
    """Every mesh with and without ZeRO and remat, by estimate: those that fit first, the least memory first."""
    plans = []
    for zero, remat in itertools.product((0, 1, 3), ("none", "full")):
        for candidate in _meshes(config.replace(mesh="auto", zero=zero, remat=remat), chips):
            if zero == 0 or candidate.dp > 1:
                plans.append(make_plan(candidate, chips, "none"))
    return sorted(plans, key=lambda plan: (not plan.fits, plan.config.mp, plan.config.remat == "full", plan.bytes))


def format_plan(plan: Plan) -> str:
    config, chip = plan.config, plan.chips.chip
    parameters = roofline.count_parameters(config)
    lines = [
        f"{parameters / 1e6:,.2f}M parameters, {roofline.flops_per_token(config) / 1e9:,.4f} GFLOP per trained token, "
        f"{config.batch} x {config.seq} tokens a step",
        f"mesh {config.mesh} ({config.mesh_axes}) on {plan.chips}: {format_bytes(chip.memory)} of memory each",
        "",
        format_table(list(_byte_rows(plan)), ["on one device", "bytes", "from"]),
        "",
    ]
    if plan.compiled and plan.compiled.collectives is not None:
        lines += [format_collectives(config, plan.compiled.collectives), ""]
    if plan.times:
        lines += [_format_times(plan), ""]
    if not plan.compiled:
        lines += ["nothing was compiled: bytes are an estimate, and collectives are not known"]
    elif plan.compiled.compiler == "cpu":
        extra = "; the extra `aot` brings the TPU compiler" if plan.chips.is_tpu else ""
        lines += [f"collectives as compiled for this machine's CPU in {plan.compiled.seconds:.0f} s{extra}"]
    else:
        cycles = plan.compiled.cycles / 1e6
        guess = f"; it guesses {cycles:,.1f}M cycles a step, without what crosses the wire" if cycles else ""
        lines += [f"compiled for {plan.chips} by libtpu in {plan.compiled.seconds:.0f} s{guess}"]
    return "\n".join([*lines, format_verdict(plan)])


def _byte_rows(plan: Plan) -> Iterator[list[str]]:
    for kind, count in plan.held._asdict().items():
        if count:
            yield [kind, format_bytes(count), "exact"]
    yield ["activations, temporaries", format_bytes(plan.temporaries), "estimated"]
    yield ["together", format_bytes(plan.estimate), "estimated"]
    if plan.compiled and not plan.compiled.refused:
        yield ["together", format_bytes(plan.compiled.bytes), f"compiled by {plan.compiled.compiler}"]
    yield ["cache of one sample", format_bytes(memory.cache_bytes(plan.config)), "exact"]


def format_collectives(config: Config, found: list[collectives.Collective]) -> str:
    rows = [
        [operation, axes, tensors, format_bytes(sent)]
        for (operation, axes), (tensors, sent) in sorted(collectives.total_by_kind(found, config.mesh_shape).items())
    ]
    return format_table(rows, ["collective", "axis", "tensors a step", "bytes on one device"]) if rows else (
        "no collective: one device")  # fmt: skip


def _format_times(plan: Plan) -> str:
    times = plan.times
    rows = [[name, f"{seconds * 1e3:.2f}"] for name, seconds in times._asdict().items()]
    return (
        format_table(rows, ["at best", "ms a step"])
        + f"\n{times.binding} binds: at most {plan.tokens_per_second:,.0f} tokens/s, {plan.utilization:.0%} MFU\n"
        f"chip constants: {plan.chips.chip.source}"
    )


def format_verdict(plan: Plan) -> str:
    limit = plan.chips.chip.memory
    if plan.fits:
        return f"fits: {format_bytes(limit - plan.bytes)} to spare on each device"
    words = f"does not fit: {format_bytes(plan.bytes - limit)} too much on each device"
    if plan.compiled and plan.compiled.refused:
        words = f"does not fit: by estimate {format_bytes(plan.bytes - limit)} too much; {plan.compiled.refused}"
    nearest = propose(plan)
    if nearest is None:
        return f"{words}; no mesh of {plan.chips} is estimated to fit: take more chips or a smaller model"
    return f"{words}; this is estimated to fit: {format_changes(plan.config, nearest)}"


def format_changes(before: Config, after: Config) -> str:
    names = [name for name in ("mesh", "zero", "remat", "accum") if getattr(before, name) != getattr(after, name)]
    return " ".join(f"{name}={str(getattr(after, name)).lower()}" for name in names)


def format_sweep(plans: list[Plan]) -> str:
    header = ["mesh", "zero", "remat", "held", "activations, temporaries", "together", "fits"]
    return format_table([_sweep_row(plan) for plan in plans], header) + "\nby estimate; nothing was compiled"


def _sweep_row(plan: Plan) -> list[str]:
    over = plan.bytes - plan.chips.chip.memory
    sizes = map(format_bytes, (plan.held.total, plan.temporaries, plan.bytes))
    words = "yes" if plan.fits else f"no: {format_bytes(over)} too much"
    return [plan.config.mesh, str(plan.config.zero), plan.config.remat, *sizes, words]
