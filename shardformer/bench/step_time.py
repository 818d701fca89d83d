"""`bench step`: our train step against a plain one-device Haiku + optax step of the same model; `bench mesh`: ours on
several meshes. Whatever is compared runs in turns in one process, so that a busy machine slows all of it alike.

Model FLOPs are `report.roofline.flops_per_token`: causal attention counts once, and recomputation (remat) does not.
"""

import dataclasses
import os
import time
import timeit
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from shardformer import mesh
from shardformer.bench import reference
from shardformer.config import Config
from shardformer.errors import RunError, UsageError
from shardformer.parsing import key
from shardformer.report.chips import find_chip
from shardformer.report.roofline import flops_per_token
from shardformer.tables import format_table
from shardformer.training.step import IN_FLIGHT, Trainer


@dataclasses.dataclass(frozen=True)
class Measuring:
    """The measurement (every key of a run is taken as well)."""

    preset: str = key("shakespeare_cpu", "the preset to measure")
    rounds: int = key(15, "turns of each contender; medians are over turns")
    turn: int = key(8, "steps per turn")
    meshes: str = key("1x1,2x1,4x2,8x1,2x4,1x8", "meshes of `bench mesh`")
    mb: int = key(1000, "size of the state in `bench checkpoint`, in MB")

    def __post_init__(self):
        if min(self.rounds, self.turn) < 1:
            raise UsageError(f"rounds and turn are at least 1; got rounds={self.rounds} turn={self.turn}")


@dataclasses.dataclass
class Contender:
    """A step with its state and its compiled programs. Each turn's milliseconds per step are kept."""

    name: str
    devices: int
    step: Callable[[Any, int], tuple[Any, jax.Array]]  # (state, number) -> (state, what to wait for)
    state: Any
    programs: list[jax.stages.Compiled]
    done: int = 0
    turns: list[float] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> float:
        """The loss of the last of these steps, which has then been waited for."""
        pending = deque()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.done)
            self.done += 1
            pending.append(metrics)
            if len(pending) > IN_FLIGHT:  # as the training loop does
                jax.block_until_ready(pending.popleft())
        return float(np.ravel(metrics)[0])

    def speed(self, base: "Contender") -> float:
        """How many times as fast, turn by turn, in the median."""
        return float(np.median(np.divide(base.turns, self.turns)))

    @property
    def bytes(self) -> int | None:
        """Per device, at the peak; None where the backend does not say."""
        peaks = [peak_bytes(program) for program in self.programs]
        return None if None in peaks else max(peaks)

    @property
    def temporary_bytes(self) -> int:
        """Per device, beside the state: activations, most of all."""
        return max(program.memory_analysis().temp_size_in_bytes for program in self.programs)


def bench_step(options: Measuring, settings: Config) -> None:
    """Ours against the reference, which starts from our parameters and must compute the same first loss."""
    settings = mesh.start(settings)
    batch = make_batch(settings)
    contenders = [plain(settings, batch), ours(settings, batch, f"shardformer {settings.mesh}")]
    losses = [contender.run(1) for contender in contenders]
    agreement = abs(losses[1] / losses[0] - 1)
    if not agreement <= (1e-5 if settings.dtype == "float32" else 1e-2):
        raise RunError(f"this is not the same model: the first losses are {losses[0]:.7f} (reference), {losses[1]:.7f}")
    print(report(contenders, options, settings))
    ratio = contenders[1].speed(contenders[0])
    print(f"first losses agree to {agreement:.0e}; {ratio:.2f} x the reference's speed")


def bench_mesh(options: Measuring, base: Config) -> None:
    """The same step on each mesh that fits the devices and the model."""
    mesh.use_cpu_devices(8)
    batch, contenders = make_batch(base), []
    for shape in options.meshes.split(","):
        try:
            settings = base.replace(mesh=shape)
            if settings.devices > len(mesh.find_devices()):
                raise UsageError(f"there are {len(mesh.find_devices())} devices")
            contenders.append(ours(settings, batch, shape))
        except UsageError as reason:
            print(f"without {shape}: {reason}")
    if not contenders:
        raise UsageError(f"none of meshes={options.meshes} fits; see above")
    print(report(contenders, options, base))


def make_batch(c: Config) -> dict[str, np.ndarray]:
    tokens = np.random.default_rng(c.seed).integers(0, c.vocab, (c.batch, c.seq + 1), dtype=np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


def measure(contenders: list[Contender], options: Measuring) -> None:
    """Turn by turn, each turn waited for."""
    for contender in contenders:
        contender.run(3)  # the first runs of a program also allocate
    for _ in range(options.rounds):
        for contender in contenders:
            start = time.perf_counter()
            contender.run(options.turn)
            contender.turns.append((time.perf_counter() - start) / options.turn * 1e3)


def ours(c: Config, batch, name: str) -> Contender:
    trainer = Trainer(c, mesh.make(c))
    state = trainer.init()
    programs = [lowered.compile() for lowered in trainer.lowered(state, batch)]
    advance = lambda state, number: trainer.step(state, batch, number)
    return Contender(name, c.devices, advance, state, programs)


def plain(c: Config, batch) -> Contender:
    update, state = reference.step_and_state(c)
    compiled = jax.jit(update, donate_argnums=0).lower(state, batch).compile()
    return Contender("plain Haiku + optax", 1, lambda state, _: compiled(state, batch), state, [compiled])


def peak_bytes(compiled) -> int | None:
    """Of one device, as XLA plans it; None where the backend does not say."""
    m = compiled.memory_analysis()
    aliased = m and m.alias_size_in_bytes  # a donated input is its output's memory
    return m and m.argument_size_in_bytes + m.output_size_in_bytes - aliased + m.temp_size_in_bytes


def report(contenders: list[Contender], options: Measuring, c: Config) -> str:
    """The table of what each measures; speeds are relative to the first."""
    measure(contenders, options)
    flops, ceiling, rows = flops_per_token(c) * c.batch * c.seq, device_flops(), []
    for it in contenders:
        ms = float(np.median(it.turns))
        rate = flops / ms * 1e3
        peak = ceiling and ceiling * (1 if jax.default_backend() == "cpu" else it.devices)  # CPU devices share theirs
        times = f"{ms:.2f}", f"{min(it.turns):.2f}", f"{c.batch * c.seq / ms * 1e3:,.0f}", f"{rate / 1e12:.3f}"
        share, megabytes = f"{rate / peak:.1%}" if peak else "-", f"{it.bytes / 1e6:.1f}" if it.bytes else "-"
        rows.append([it.name, *times, share, megabytes, f"{it.speed(contenders[0]):.2f}"])
    return (
        f"{options.preset}: {c.batch} x {c.seq} tokens a step, {c.layers} layers, d_model {c.d_model}, {c.dtype}, on "
        f"{_describe_machine()}; medians of {options.rounds} turns of {options.turn} steps\n"
        + format_table(rows, ["step", "ms", "fastest", "tokens/s", "TFLOP/s", "MFU", "MB/device", "speed"])
    )


def _describe_machine() -> str:
    """The devices, and what else decides how fast a CPU is."""
    kind = jax.devices()[0].device_kind
    if kind != "cpu":
        return kind
    return f"cpu ({os.cpu_count()} cores, NPROC {os.environ.get('NPROC', 'not set')})"


def device_flops() -> float | None:
    """Per second: of an accelerator by its data sheet, of a CPU by what a large product reaches; None if unknown."""
    if jax.default_backend() != "cpu":
        chip = find_chip(jax.devices()[0].device_kind)
        return chip and chip.flops
    x = jnp.ones((1024, 1024))
    seconds = timeit.repeat(lambda: (x @ x).block_until_ready(), number=1, repeat=30)
    return 2 * x.size * len(x) / min(seconds)
