"""Steps that run interleaved, so that a busy machine slows all of them equally."""

import dataclasses
import re
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from shardformer.bench.bench_options import Measuring
from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.layout import mesh
from shardformer.training.trainer import IN_FLIGHT, Trainer


@dataclasses.dataclass
class Contender:
    """A step with its state, its compiled programs and the milliseconds per step of each round."""

    name: str
    devices: int
    step: Callable[[Any, int], tuple[Any, Any]]  # (state, step) -> (state, metrics); the first metric is the loss
    state: Any
    programs: list[jax.stages.Compiled] = dataclasses.field(default_factory=list)  # empty if JAX did not compile it
    select: Callable[[Any], Any] | None = None  # the parameters of a state, with a module for each layer
    done: int = 0
    cpu_seconds: float = 0.0  # of all steps, on all cores
    times: list[float] = dataclasses.field(default_factory=list)

    def run(self, steps: int) -> float:
        """Runs some steps, waits for the last one and returns its loss."""
        pending: deque = deque()
        started = time.process_time()
        for _ in range(steps):
            self.state, metrics = self.step(self.state, self.done)
            self.done += 1
            pending.append(metrics)
            if len(pending) > IN_FLIGHT:  # as the training loop does
                jax.block_until_ready(pending.popleft())
        loss = float(np.ravel(metrics)[0])
        self.cpu_seconds += time.process_time() - started
        return loss

    def read_parameters(self) -> dict:
        """Returns the parameters after the last step, with a module for each layer."""
        if self.select is None:
            raise UsageError(f"{self.name} cannot return its parameters")
        return self.select(self.state)

    @property
    def milliseconds(self) -> float:
        return float(np.median(self.times))

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, high = np.percentile(self.times, [25, 75])
        return float(high - low) / 2 / self.milliseconds

    def speed(self, base: "Contender") -> float:
        """Returns the median over rounds of the base's time over this one's."""
        return float(np.median(np.divide(base.times, self.times)))

    @property
    def bytes(self) -> int | None:
        """Peak bytes per device; None if unknown."""
        peaks = [peak_bytes(program) for program in self.programs]
        known = [peak for peak in peaks if peak is not None]
        return max(known) if peaks and len(known) == len(peaks) else None

    @property
    def temporary_bytes(self) -> int:
        """Peak bytes per device next to the state: mostly activations."""
        return max(getattr(program.memory_analysis(), "temp_size_in_bytes", 0) for program in self.programs)


class RepeatedBatch:
    """The batches of a measurement of time: the same one for every step."""

    def __init__(self, batch):
        self.batch = batch

    def __getitem__(self, step: int):
        return self.batch


def ours(c: Config, batches, name: str) -> Contender:
    """Returns our step; `batches[step]` is the batch of a step."""
    trainer = Trainer(c, mesh.make(c))
    state = trainer.init()
    programs = [lowered.compile() for lowered in trainer.lower(state, batches[0])]

    def step(state, number):
        return trainer.step(state, batches[number], number)

    return Contender(name, c.parallel.devices, step, state, programs, lambda state: unstack(state.params))


def unstack(params) -> dict:
    """Returns our parameters with a module for each layer, as other implementations have them."""
    named: dict[str, dict] = {}
    for module, leaves in params.items():
        top, layers, inner = module.partition("/layers")
        count = len(next(iter(leaves.values()))) if layers else 1
        for i in range(count):
            name = f"{top}/layers_{i}{inner}" if layers else module
            named[name] = {n: leaf[i] for n, leaf in leaves.items()} if layers else leaves
    return named


def stack(named) -> dict:
    """Returns parameters with a module for each layer as ours, in which the leaves of the layers lead with L."""
    stacked: dict[str, dict] = {}
    layers: dict[str, dict[int, dict]] = {}
    for module, leaves in named.items():
        if result := re.fullmatch(r"(.*/layers)_(\d+)(.*)", module):
            top, number, inner = result.groups()
            layers.setdefault(top + inner, {})[int(number)] = leaves
        else:
            stacked[module] = leaves
    for module, by_number in layers.items():
        in_order = [by_number[number] for number in range(len(by_number))]
        stacked[module] = {name: np.stack([leaves[name] for leaves in in_order]) for name in in_order[0]}
    return stacked


def measure(contenders: list[Contender], options: Measuring) -> None:
    """Runs the contenders interleaved, round by round, and waits for each round.

    The first step of a round is not measured: during the rounds of the others, Linux (and the host of a virtual
    machine) took back the memory that a step uses.
    """
    for contender in contenders:
        contender.run(3)  # the first runs of a program also allocate
    for _ in range(options.rounds):
        for contender in contenders:
            contender.run(1)
            start = time.perf_counter()
            contender.run(options.turn)
            contender.times.append((time.perf_counter() - start) / options.turn * 1e3)


def peak_bytes(compiled) -> int | None:
    """Returns the peak bytes of one device by XLA's plan; None if the backend reports none."""
    m = compiled.memory_analysis()
    aliased = m and m.alias_size_in_bytes  # a donated input shares the memory of its output
    return m and m.argument_size_in_bytes + m.output_size_in_bytes - aliased + m.temp_size_in_bytes
