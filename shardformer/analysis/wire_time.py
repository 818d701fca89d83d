"""Times a TPU's program by the schedule that its compiler printed: what the wire adds to the arithmetic.

The method. The lines of each computation run in their order. A fusion takes the compiler's `estimated_cycles` at the
chip's clock. A transfer starts at its `start` operation when its links are free, takes its bytes over the links'
bandwidth, and a `done` waits for it; the waiting is exposed. A collective without start and done is exposed fully. A
loop's body is timed once, with idle links, and multiplied. Of the branches of a conditional the longest counts: it is
the optimizer's update, which a step with a non-finite gradient leaves out. Links are those of the torus dimensions that
the devices span: both directions of each for a collective, one direction for a ring of sends. Kernels have no estimate:
they count as their FLOPs at `KERNEL_SHARE` or `GROUPED_SHARE` of the chip's peak, each call of a kind alike, and
transfers go on meanwhile.

What it leaves out: latencies, the memory traffic of transfers, slices whose torus is open at its ends (a v5e or v6e of
fewer than 16 chips in a dimension has half of this bandwidth), and arithmetic that is faster or slower than estimated.
"""

import re
from collections import defaultdict
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from shardformer.analysis import hlo, program_collectives
from shardformer.analysis.program_collectives import Collective, wire_bytes
from shardformer.config import Config
from shardformer.devices.chips import Slice
from shardformer.model import flops

KERNEL_SHARE = 0.5  # of the peak, for attention kernels: an assumption
GROUPED_SHARE = 0.75  # of the peak, for the grouped products of experts: an assumption too
KERNEL_PASSES = 3.5  # of the forward pass's FLOPs: the backward pass computes five products where that has two

ATTENTION_KERNEL, GROUPED_KERNEL = "%splash", "gmm"  # in the names of the programs' custom calls
CUSTOM_CALL = " custom-call("

_NAME = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ")
_START = re.compile(r"^(async-collective|collective-permute|all-reduce|all-gather|all-to-all)-start([\w.\-]*)$")
_FUSED_DONE = re.compile(r"^async-collective-done([\w.\-]*)$")
_DONE = re.compile(r" (?:collective-permute|all-reduce|all-gather|all-to-all)-done\(%?([\w.\-]+)")

Link = tuple[int, int]  # (dimension of the torus, direction)


class Timeline(NamedTuple):
    """Seconds of one step on one device."""

    computing: float = 0.0  # estimated cycles, without kernels and wire
    kernels: float = 0.0
    exposed: float = 0.0  # nothing but the wire works
    wire: float = 0.0  # all transfers, one after the other

    @property
    def seconds(self) -> float:
        return self.computing + self.kernels + self.exposed

    def plus(self, other: "Timeline", times: float = 1.0) -> "Timeline":
        """Returns the timeline of a program that goes on with another, which runs so many times."""
        return Timeline(*(mine + times * theirs for mine, theirs in zip(self, other, strict=True)))


def time_step(text: str, places: np.ndarray, config: Config, chips: Slice) -> Timeline:
    """Returns the timeline of a compiled step; `places` has each device's coordinates, in the order of the mesh."""
    return _Simulation(text, places, chips, _seconds_of_calls(text, config, chips)).run_program()


def utilization(timeline: Timeline, config: Config, chips: Slice) -> float:
    """Returns the MFU of a step that takes this long."""
    return (
        config.training.batch * config.model.seq / timeline.seconds / flops.peak_tokens_per_second(config, chips.chip)
    )


def _seconds_of_calls(text: str, config: Config, chips: Slice) -> dict[str, float]:
    """Returns the seconds of one call of each kind of kernel in a program, by the kind's name."""
    tokens = config.training.batch * config.model.seq / config.parallel.devices
    recomputed = config.parallel.remat == "full"
    step, forward = flops.expert_flops_per_token(config)
    of_attention = (KERNEL_PASSES + recomputed) * flops.attention_flops(config)
    seconds = {
        ATTENTION_KERNEL: of_attention * tokens / (KERNEL_SHARE * chips.chip.flops),
        GROUPED_KERNEL: (step + recomputed * forward) * tokens / (GROUPED_SHARE * chips.chip.flops),
    }
    calls: dict[str, float] = defaultdict(float)
    for line in hlo.running_lines(text):
        if kind := _find_kernel(line.text):
            calls[kind] += line.times
    return {kind: seconds[kind] / count for kind, count in calls.items()}


def _find_kernel(line: str) -> str:
    """Returns the kind of kernel that a line calls; "" for any other line."""
    name = line.partition(" = ")[0]
    kinds = (ATTENTION_KERNEL, GROUPED_KERNEL) if CUSTOM_CALL in line else ()
    return next((kind for kind in kinds if kind in name), "")


class _Simulation:
    """A walk through the schedule with one clock for the arithmetic and one for each link."""

    def __init__(self, text: str, places: np.ndarray, chips: Slice, seconds_of_calls: dict[str, float]):
        self._computations, self._entry = hlo.find_computations(text)
        self._devices = program_collectives.count_devices(text)
        self._places, self._chips = places, chips
        self._seconds_of_calls = seconds_of_calls

    def run_program(self) -> Timeline:
        return self._run(self._entry)

    def _run(self, name: str | None) -> Timeline:
        result = Timeline()
        free: dict[Link, float] = defaultdict(float)
        ends: dict[str, float] = {}  # of the transfers in flight, by the names of their starts
        for line in self._computations.get(name or "", ()):
            label = match[1] if (match := _NAME.search(line)) else ""
            now = result.seconds
            if loop := hlo.find_loop(line, self._computations):
                body, trips = loop
                result = result.plus(self._run(body), trips)
            elif branches := hlo.find_branches(line):
                result = result.plus(max((self._run(branch) for branch in branches), key=lambda times: times.seconds))
            elif kernel := _find_kernel(line):
                result = result.plus(Timeline(kernels=self._seconds_of_calls[kernel]))
            elif sent := self._find_transfers(line):
                for each in sent:
                    links, seconds = self._links(each), self._seconds(each)
                    end = max([now, *(free[link] for link in links)]) + seconds
                    free.update(dict.fromkeys(links, end))
                    ends[label] = max(end, ends.get(label, 0.0))
                    result = result.plus(Timeline(wire=seconds))
                if not _START.search(label):
                    result = result.plus(Timeline(exposed=ends[label] - now))
            elif waited := _find_start(line, label):
                result = result.plus(Timeline(exposed=max(ends.get(waited, now) - now, 0.0)))
            result = result.plus(Timeline(computing=hlo.read_estimate(line) / self._chips.chip.clock))
        return result

    def _find_transfers(self, line: str) -> list[Collective]:
        """Returns the collectives of a line, or of the fusion that the line calls if that is one."""
        if "-done" in line.partition(" = ")[0]:
            return []
        called = re.search(r"calls=%?([\w.\-]+)", line)
        if called and called[1].startswith("async_collective_fusion"):  # it goes on with a transfer that has begun
            return []
        inside = self._computations.get(called[1], ()) if called else ()
        lines = inside if called else [line]
        by_line = [program_collectives.parse_line(text, called[1] if called else "", self._devices) for text in lines]
        return [each for collectives in by_line for each in collectives if max(map(len, each.groups)) > 1]

    def _moves(self, collective: Collective) -> np.ndarray:
        """Returns the differences of coordinates between the devices of the first groups."""
        groups = [group for group in collective.groups if len(set(group)) > 1]
        return np.array([self._places[group[1]] - self._places[group[0]] for group in groups])

    def _links(self, collective: Collective) -> Iterable[Link]:
        if collective.operation != "collective-permute":
            return [(dimension, sign) for dimension in self._spanned(collective) for sign in (1, -1)]
        moves = self._moves(collective)
        sign = 1 if (moves == 1).sum() >= (moves == -1).sum() else -1
        return [(int(dimension), sign) for dimension in np.flatnonzero(moves.any(axis=0))]

    def _group_places(self, collective: Collective) -> np.ndarray:
        """Returns the coordinates of the devices of the largest group."""
        group = max(collective.groups, key=len)
        return self._places[list(group)]

    def _spanned(self, collective: Collective) -> list[int]:
        """Returns the dimensions of the torus in which the devices of a group differ."""
        places = self._group_places(collective)
        return np.flatnonzero((places != places[0]).any(axis=0)).tolist()

    def _seconds(self, collective: Collective) -> float:
        chip = self._chips.chip
        one_way = chip.wire / chip.dimensions / 2
        if collective.operation == "all-to-all":
            return collective.bytes * self._mean_distance(collective) / (2 * one_way)
        dimensions = 1 if collective.operation == "collective-permute" else 2 * max(len(self._spanned(collective)), 1)
        return wire_bytes(collective) / (one_way * dimensions)

    def _mean_distance(self, collective: Collective) -> float:
        """Returns the mean number of links between two devices of a group in the dimension where it is the largest."""
        places = self._group_places(collective)
        sizes = [len(set(column)) for column in places.T.tolist()]
        return max(size**2 // 4 / size for size in sizes)  # on a closed ring, each device itself included


def _find_start(line: str, label: str) -> str | None:
    """Returns the name of the start whose end a line waits for."""
    if fused := _FUSED_DONE.search(label):
        return f"async-collective-start{fused[1]}"
    return match[1] if (match := _DONE.search(line)) else None
