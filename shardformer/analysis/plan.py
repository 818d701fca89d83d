"""Plans a step on chips that need not exist: bytes, collectives, time, and whether it fits."""

import itertools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from shardformer.adapters.adapter_keys import select_trainable
from shardformer.analysis import compiling, memory, program_collectives, roofline, temporaries, traced, wire_time
from shardformer.analysis.compiling import CompiledStep
from shardformer.analysis.memory import DeviceBytes
from shardformer.analysis.program_collectives import Collective
from shardformer.analysis.roofline import Roofline
from shardformer.analysis.wire_time import Timeline
from shardformer.config import Config
from shardformer.devices import chips as chip_table
from shardformer.devices.chips import Slice, describe_chip
from shardformer.errors import UsageError
from shardformer.layout import Layout, choices, mesh, specs, torus
from shardformer.model import flops
from shardformer.model.task_on_mesh import choose_task
from shardformer.tables import format_bytes, format_table

MARGIN = 1.1  # on the estimate of a proposed setting
SWEPT_REMAT = ("none", "dots", "full")
CPU_DEVICES = 16  # the most forced CPU devices of a compile


class Plan(NamedTuple):
    """One configuration on one slice of chips."""

    config: Config
    chips: Slice
    stored: DeviceBytes
    temporaries: int  # estimated
    sent: list[Collective]  # found in the trace
    times: Roofline
    compiled: CompiledStep | None = None

    @property
    def bytes(self) -> int:
        """The bytes on one device: compiled for this chip if possible, else estimated."""
        if self.compiled and self.compiled.compiler == "libtpu" and not self.compiled.refused:
            return self.compiled_bytes
        return self.estimate

    @property
    def compiled_bytes(self) -> int:
        """The bytes of the compiled step on one device, with those of the reward model, which no step reads."""
        assert self.compiled is not None
        return self.compiled.bytes + self.stored.reward_model

    @property
    def estimate(self) -> int:
        return self.stored.total + self.temporaries

    @property
    def fits(self) -> bool:
        refused = self.compiled is not None and bool(self.compiled.refused)
        return not refused and self.bytes <= self.chips.chip.memory

    @property
    def forecast(self) -> float:
        """The seconds that a step is expected to take: by the compiler's schedule if there is one."""
        if self.compiled and self.compiled.timeline:
            return self.compiled.timeline.seconds
        return roofline.forecast_seconds(self.times, self.config, self.chips)

    @property
    def tokens_per_second(self) -> float:
        """The forecast speed."""
        return self.config.training.batch * self.config.model.seq / self.forecast

    @property
    def utilization(self) -> float:
        """Model FLOPs over the chips' peak (MFU), by the forecast."""
        peak = flops.peak_tokens_per_second(self.config, self.chips.chip)
        return self.tokens_per_second / peak if peak else 0.0  # a task may not know its FLOPs


def resolve(config: Config, chips: Slice) -> Config:
    """Resolves mesh=auto to the least mp, and accum=auto to the fewest microbatches, that are estimated to fit.

    If none fits, it returns the most.
    """
    if config.parallel.mesh != "auto" and config.parallel.devices != chips.count:
        fitting = next(_meshes(config.replace(mesh="auto"), chips))
        raise UsageError(
            f"mesh={config.parallel.mesh} takes {config.parallel.devices} devices, and chip={chips} has {chips.count}; "
            f"try mesh={fitting.parallel.mesh}"
        )
    if config.parallel.mesh != "auto" and config.training.accum:
        return config
    shapes = list(_meshes(config, chips))
    return next((c for c in shapes if _is_estimated_to_fit(c, chips)), shapes[-1])


def find_data_parallel(config: Config, chips: Slice) -> Config | None:
    """Resolves mesh=auto to dp alone, None if that is not estimated to fit: no mesh is faster for a model that fits."""
    alone = (each for each in _meshes(config, chips) if each.parallel.mp == each.parallel.pp == 1)
    return next((each for each in alone if _is_estimated_to_fit(each, chips)), None)


def _meshes(config: Config, chips: Slice) -> Iterator[Config]:
    """Yields all shapes of the slice that the config allows, the least mp first."""
    result = list(mesh.candidates(config, chips.count))
    if not result:
        parts = chips.count * max(config.training.accum, 1)
        raise UsageError(
            f"no mesh of {chips.count} devices fits batch={config.training.batch} and heads={config.model.heads}; try "
            f"batch={-(-config.training.batch // parts) * parts}"
        )
    yield from list(filter(splits_reward_model, result)) or result  # the use of any of these then says why not


def splits_reward_model(config: Config) -> bool:
    """Returns whether the mesh divides the sizes of the reward model of a policy, if it has one."""
    if not config.objective.takes_reward:
        return True
    try:
        memory.make_trainer(config).model.companion_shapes()
    except UsageError:
        return False
    return True


def estimate(config: Config, chips: Slice) -> Plan:
    """Plans by arithmetic and a trace, in seconds; compiles nothing."""
    stored, layout = memory.predict_bytes(config), resolve_on(config, chips)
    sent = traced.find_collectives(layout)
    traffic = traced.traffic_bytes(layout) + 2 * _updated_bytes(config, stored)  # read and written
    times = roofline.predict_times(layout, chips, traffic, sent, stored.host)
    return Plan(config, chips, stored, estimate_temporaries(config, chips), sent, times)


def resolve_on(config: Config, chips: Slice) -> Layout:
    """Returns the layout of a config whose mesh is known, on the devices of a slice."""
    hardware = describe_chip(chips.platform, chips.chip)
    return choices.resolve(config, hardware, torus.factor_slice(config, hardware, chips.shape))


def _updated_bytes(config: Config, stored: DeviceBytes) -> int:
    """Returns the bytes of the state that a step updates: all but the frozen weights under adapters."""
    trainable = jax.tree.leaves(select_trainable(traced.make_trainer(config).abstract.params, config))
    parameters = sum(math.prod(leaf.sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize for leaf in trainable)
    return stored.total + stored.host - stored.parameters + parameters  # the host's part passes through


def estimate_temporaries(config: Config, chips: Slice) -> int:
    """Returns the temporaries in main memory: XLA fills the chip's fast memory first."""
    return max(temporaries.estimate_temporaries(resolve_on(config, chips)) - int(chips.chip.fast_memory), 0)


def choose_compiler(chips: Slice, wish: str = "auto") -> str:
    """Returns libtpu, cpu or none; auto is libtpu if installed, else cpu for few devices."""
    if wish == "libtpu" and chips.is_tpu and not compiling.has_libtpu():
        raise UsageError("compiler=libtpu needs the extra `aot`: pip install 'shardformer[aot]'; or give compiler=cpu")
    if wish == "libtpu" and not chips.is_tpu:
        raise UsageError(f"compiler=libtpu compiles for TPUs, got chip={chips}; give compiler=cpu or none")
    if wish != "auto":
        return wish
    if chips.is_tpu and compiling.has_libtpu():
        return "libtpu"
    return "cpu" if chips.count <= CPU_DEVICES else "none"


def compile_plan(plan: Plan, compiler: str) -> Plan:
    """Returns the plan with a compiler's figures."""
    if compiler == "libtpu":
        device_mesh = compiling.tpu_mesh(plan.config, plan.chips)
    else:
        mesh.use_cpu_devices(plan.chips.count)
        device_mesh = mesh.make(plan.config)
    return plan._replace(compiled=compiling.compile_step(plan.config, device_mesh, compiler, plan.chips))


def propose(plan: Plan) -> Config | None:
    """Returns the nearest settings that are estimated to fit: first another mesh, then ZeRO, remat, microbatches."""
    config = plan.config
    full: dict[str, Any] = {"remat": "full"}
    extras: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 3}, full, full | {"zero": 1}, full | {"zero": 3}]
    extras += [full | {"zero": 3, "accum": config.training.accum * n} for n in (2, 4, 8, 16)]
    for changes in extras:
        try:
            changed = config.replace(**{"mesh": "auto"} | changes)
            shapes = list(_meshes(changed, plan.chips))
        except UsageError:
            continue
        for candidate in shapes:
            trainable = candidate if candidate.parallel.replicas > 1 else candidate.replace(zero=0)
            if trainable != config and _is_estimated_to_fit(trainable, plan.chips):
                return trainable
    return None


def _is_estimated_to_fit(config: Config, chips: Slice) -> bool:
    stored = memory.predict_bytes(config).total  # cheaper than the estimate of temporaries
    limit = chips.chip.memory
    return stored <= limit and (stored + estimate_temporaries(config, chips)) * MARGIN <= limit


def sweep(config: Config, chips: Slice) -> list[Plan]:
    """Estimates every dp x mp mesh with and without ZeRO and remat; fitting settings first, the fastest first."""
    if not config.training.accum:
        raise UsageError("sweep=true compares meshes at one number of microbatches; give accum=1, say, got accum=auto")
    memory.predict_bytes(next(_meshes(config.replace(mesh="auto", zero=0), chips)))  # raises if no mesh is possible
    plans: list[Plan] = []
    levels = (0, 1) if config.training.grad_metrics else (0, 1, 3)
    for zero, remat in itertools.product(levels, SWEPT_REMAT):
        meshes = mesh.candidates(config.replace(mesh="auto", zero=zero, remat=remat), chips.count)
        for candidate in filter(splits_reward_model, meshes):
            if zero == 0 or candidate.parallel.dp > 1:
                plans.append(estimate(candidate, chips))
    return sorted(plans, key=lambda plan: (not plan.fits, plan.times.seconds if plan.fits else plan.bytes, plan.bytes))


def format_needs(plan: Plan) -> str:
    """Formats the model, the mesh, and the bytes on one device."""
    config, chip = plan.config, plan.chips.chip
    parameters = specs.count_parameters(choose_task(config).abstract_parameters(config))
    return "\n".join([
        f"{parameters / 1e6:,.2f}M parameters{flops.describe_active(config)}, "
        f"{flops.flops_per_token(config) / 1e9:,.4f} GFLOP per trained token, "
        f"{config.training.batch} x {config.objective.row_tokens} tokens a step",
        f"mesh {config.parallel.mesh} ({config.parallel.mesh_axes}) on {plan.chips}: {format_bytes(chip.memory)} of "
        "memory each",
        "",
        format_table(list(_byte_rows(plan)), ["on one device", "bytes", "from"]),
    ])  # fmt: skip


def format_speed(plan: Plan) -> str:
    """Formats what a step sends, the least time that it can take, and the forecast."""
    return f"\n{format_collectives(plan.config, plan.sent)}\n\n{_format_times(plan)}\n"


def format_compiled(plan: Plan) -> str:
    """Formats the compiler's figures next to the estimate."""
    step = plan.compiled
    assert step is not None
    name = f"libtpu for {plan.chips}" if step.compiler == "libtpu" else "XLA for this machine's CPU"
    cycles = f"{step.cycles / 1e6:,.1f}M cycles a step, without the wire and fused attention"
    guess = f"; it guesses {cycles}" if step.cycles else ""
    lines = [f"compiled by {name} in {step.seconds:.0f} s{guess}"]
    if not step.refused:
        rows = [["state and batch", format_bytes(step.arguments)], ["temporary", format_bytes(step.temporary)],
                *([["reward model", format_bytes(rewards)]] if (rewards := plan.stored.reward_model) else []),
                ["together", format_bytes(plan.compiled_bytes)]]  # fmt: skip
        off = plan.estimate / plan.compiled_bytes - 1
        remark = f"the estimate is {abs(off):.0%} {'above' if off > 0 else 'below'} that"
        if step.compiler == "cpu":
            remark = "another compiler than the chip's: its bytes say little of a chip's, its collectives more"
        lines += [format_table(rows, ["on one device", "compiled"]), remark, ""]
    if step.timeline:
        lines += [_format_timeline(plan, step.timeline), ""]
    if step.collectives is not None:
        lines += [format_collectives(plan.config, step.collectives), ""]
    return "\n".join(lines)


def _format_timeline(plan: Plan, timeline: Timeline) -> str:
    """Formats a compiled step's time by its schedule; see wire_time.py for the method."""
    rows = [
        ["estimated cycles", _milliseconds(timeline.computing)],
        [_describe_kernels(plan.config), _milliseconds(timeline.kernels)],
        ["exposed wire", _milliseconds(timeline.exposed)],
        ["step", _milliseconds(timeline.seconds)],
    ]
    share = wire_time.utilization(timeline, plan.config, plan.chips)
    sent = f"{_milliseconds(timeline.wire)} ms of transfers, of which the exposed wire is not hidden"
    return f"{format_table(rows, ['by the schedule', 'ms a step'])}\n{share:.1%} MFU; {sent}"


def _describe_kernels(config: Config) -> str:
    of_experts = f", of experts at {wire_time.GROUPED_SHARE:.0%}" if config.experts.experts else ""
    return f"attention kernels at {wire_time.KERNEL_SHARE:.0%} of the peak{of_experts}"


def _byte_rows(plan: Plan) -> Iterator[list[str]]:
    for kind, count in plan.stored.list_kinds():
        yield [kind, format_bytes(count), "exact"]
    yield ["activations, temporaries", _format_temporaries(plan), "estimated"]
    yield ["together", format_bytes(plan.estimate), "estimated"]
    if plan.stored.host:
        yield ["optimizer, in the host's memory", format_bytes(plan.stored.host), "exact"]
    if plan.config.objective.has_vocabulary:
        yield ["cache of one sample", format_bytes(memory.cache_bytes(plan.config)), "exact"]


def _format_temporaries(plan: Plan) -> str:
    """Formats the temporaries; zero bytes of main memory means that all are in fast memory."""
    return format_bytes(plan.temporaries) if plan.temporaries else "in fast memory"


def format_collectives(config: Config, collectives: list[Collective]) -> str:
    rows = [
        [operation, axes, tensors, format_bytes(sent)]
        for (operation, axes), (tensors, sent) in sorted(
            program_collectives.total_by_kind(collectives, config.parallel.mesh_shape).items()
        )
    ]
    return format_table(rows, ["collective", "axis", "tensors a step", "bytes sent by one device"]) if rows else (
        "no collective: one device")  # fmt: skip


def _format_times(plan: Plan) -> str:
    times = plan.times
    resources = times._asdict()
    if not plan.stored.host:
        del resources["host_link"]
    rows = [[name.replace("_", " "), _milliseconds(seconds)] for name, seconds in resources.items()]
    rows.append(["step", _milliseconds(times.seconds)])
    return (
        format_table(rows, ["at best", "ms a step"])
        + f"\n{times.binding} binds: these are bounds at the chip's peak rates\n{format_forecast(plan)}\n"
        f"chip constants: {plan.chips.chip.source}{_describe_link(plan)}"
    )


def format_forecast(plan: Plan) -> str:
    """Formats the expected speed with its error."""
    return (
        f"forecast: {_milliseconds(plan.forecast)} ms a step, {plan.tokens_per_second:,.0f} tokens/s, "
        f"{plan.utilization:.0%} MFU; {describe_error(plan)}"
    )


def describe_error(plan: Plan) -> str:
    """Describes the typical error of a forecast, or the compiler's schedule that it comes from."""
    if plan.compiled and plan.compiled.timeline:
        return "by the compiler's schedule; no chip ran it"
    return f"typical error {roofline.FORECAST_ERROR:.0%}, against published steps of large models"


def _describe_link(plan: Plan) -> str:
    """Formats the rate of the link to the host's memory if the step uses it."""
    rate = f"{plan.chips.chip.host_link / 1e9:g} GB/s each way between a device and its host"
    origin = "assumed, as that of a v4 by jax-ml.github.io/scaling-book/tpus" if plan.chips.is_tpu else "PCIe"
    return f"; {rate} ({origin})" if plan.stored.host else ""


def _milliseconds(seconds: float) -> str:
    """Formats at least two digits: steps of a small model take microseconds."""
    return f"{seconds * 1e3:,.2f}" if seconds >= 1e-4 or not seconds else f"{seconds * 1e3:.2g}"


def _short_milliseconds(seconds: float) -> str:
    """Formats no decimals from a second on: the columns of a sweep share a line."""
    return f"{seconds * 1e3:,.0f}" if seconds >= 1 else _milliseconds(seconds)


def format_verdict(plan: Plan) -> str:
    limit = plan.chips.chip.memory
    if plan.fits:
        origin = "compiled" if plan.bytes != plan.estimate else "estimated"
        return f"fits, as {origin}: {format_bytes(limit - plan.bytes)} to spare on each device"
    verdict = f"does not fit: {format_bytes(plan.bytes - limit)} too much on each device"
    if plan.compiled and plan.compiled.refused:
        verdict = f"does not fit: {plan.compiled.refused}"
    nearest = propose(plan)
    if nearest is not None:
        return f"{verdict}; this is estimated to fit: {format_changes(plan.config, nearest)}"
    verdict = f"{verdict}; no mesh of {plan.chips} is estimated to fit"
    for larger in chip_table.larger_slices(plan.chips):
        if nearest := propose(plan._replace(chips=larger)):
            return f"{verdict}; this is: chip={larger} {format_changes(plan.config, nearest)}"
    return f"{verdict}: take a smaller model"


def format_changes(before: Config, after: Config) -> str:
    names = [name for name in ("mesh", "zero", "remat", "accum") if before.get(name) != after.get(name)]
    return " ".join(f"{name}={str(after.get(name)).lower()}" for name in names)


def format_sweep(plans: list[Plan]) -> str:
    header = ["mesh", "zero", "remat", "held", "temporary", "together", "compute", "memory", "exposed", "step", "MFU"]
    fitting = sum(plan.fits for plan in plans)
    return (
        format_table([_sweep_row(plan) for plan in plans], [*header, "too much"])
        + f"\n{fitting} of {len(plans)} are estimated to fit, the fastest first; the others by how much they lack.\n"
        "Times are ms at the chip's peak rates, MFU is forecast; exposed: wire while nothing is computed.\n"
        "Nothing was compiled"
    )


def _sweep_row(plan: Plan) -> list[str]:
    over = plan.bytes - plan.chips.chip.memory
    sizes = format_bytes(plan.stored.total), _format_temporaries(plan), format_bytes(plan.bytes)
    times = plan.times.compute, plan.times.memory, plan.times.exposed_wire, plan.times.seconds
    speed = *map(_short_milliseconds, times), f"{plan.utilization:.0%}"
    missing = "" if plan.fits else format_bytes(over)
    return [
        plan.config.parallel.mesh,
        str(plan.config.parallel.zero),
        plan.config.parallel.remat,
        *sizes,
        *speed,
        missing,
    ]
