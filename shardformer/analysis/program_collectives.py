"""The collectives of compiled HLO, counted in tensors and bytes, because XLA merges operations."""

import math
import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import numpy as np

from shardformer import exact
from shardformer.analysis.hlo import running_lines
from shardformer.config.names import AXES

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8,
         "s16": 2, "u16": 2}  # fmt: skip

DTYPES = {
    "float32": "f32", "bfloat16": "bf16", "float16": "f16", "float64": "f64", "bool": "pred", "int8": "s8",
    "int16": "s16", "int32": "s32", "int64": "s64", "uint8": "u8", "uint16": "u16", "uint32": "u32", "uint64": "u64",
}  # fmt: skip

_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(-start)?\((.*)$"
)
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(\{[\d,{}]*\})\}")
_ALL = re.compile(r"replica_groups=\{\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(
    r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\(\[([\d,]+)\](?:T\(([\d,]+)\))?\))? \{((?:'\w+',?)*)\}"
)

_DEVICES = re.compile(r"\b(?:replica_count|num_partitions)=(\d+)")


class Collective(NamedTuple):
    """One tensor that devices exchange."""

    operation: str
    dtype: str
    shape: tuple[int, ...]  # of the result on one device
    groups: tuple[tuple[int, ...], ...]  # the devices that exchange it
    in_loop: bool  # within a scan
    times: int = 1  # in one run of the program: iterations of the loops around it

    @property
    def bytes(self) -> int:
        """The bytes of the result; `wire_bytes` returns the bytes sent for it."""
        return math.prod(self.shape) * BYTES[self.dtype]

    def over(self, mesh_shape: tuple[int, ...], axes: tuple[str, ...] = AXES) -> str:
        """Returns the mesh axes that it crosses: 'dp', 'mp', 'dp mp', 'pp', or '' within one device."""
        exchanging = max(self.groups, key=len)
        if self.operation == "collective-permute":  # its groups are pairs of sender and receiver
            exchanging = next((pair for pair in self.groups if pair[0] != pair[1]), exchanging)
        at = np.stack(np.unravel_index(exchanging, mesh_shape), axis=1)
        moving = (at != at[0]).any(axis=0)
        return " ".join(axis for axis, moves in zip(axes, moving, strict=False) if moves)


def parse_collectives(hlo: str) -> list[Collective]:
    """Returns every tensor of every collective that a compiled module runs; follows calls and loops from its entry."""
    devices = count_devices(hlo)
    return [
        each._replace(in_loop=line.in_loop, times=int(line.times))
        for line in running_lines(hlo)
        for each in parse_line(line.text, line.computation, devices)
    ]


def count_devices(hlo: str) -> int:
    """Returns the devices of a module, whose first line omits a count of 1; 0 for a fragment without that line."""
    header = re.search(r"^HloModule .*", hlo, re.MULTILINE)
    return math.prod(map(int, _DEVICES.findall(header[0]))) if header else 0


def parse_line(text: str, computation: str, devices: int) -> list[Collective]:
    """Returns the tensors of the collective on one line; none if the line is another operation."""
    if not (match := _COLLECTIVE.search(text)):
        return []
    result, operation, start, rest = match.groups()
    if start and operation != "all-reduce":
        result = _second(result)  # the first is the operand
    groups = _groups(rest, devices)
    results = []
    for dtype, dims in _TENSOR.findall(result):
        shape = tuple(int(n) for n in dims.split(",") if n)
        if operation == "all-reduce" and "all-reduce-scatter" in computation:  # how a TPU's compiler writes it
            size = math.prod(shape) // len(groups[0])
            results.append(Collective("reduce-scatter", dtype, (size,), groups, in_loop=False))
        else:
            results.append(Collective(operation, dtype, shape, groups, in_loop=False))
    return results


def wire_bytes(c: Collective) -> float:
    """Returns the bytes that one device sends in a ring."""
    n = max(map(len, c.groups))
    sent = {
        "all-reduce": 2 * (n - 1) / n,
        "all-gather": (n - 1) / n,  # of the result
        "reduce-scatter": n - 1,  # the result is one part of n
        "all-to-all": (n - 1) / n,
        "collective-permute": 1,
    }
    return c.bytes * sent[c.operation] if n > 1 else 0.0


def total_by_kind(
    collectives: Iterable[Collective], mesh_shape: tuple[int, ...], axes: tuple[str, ...] = AXES
) -> dict[tuple[str, str], tuple[int, float]]:
    """Returns {(operation, axes): (tensors, bytes sent by one device)} of one step."""
    totals: dict[tuple[str, str], tuple[int, float]] = {}
    for c in collectives:
        if over := c.over(mesh_shape, axes):
            tensors, sent = totals.get((c.operation, over), (0, 0.0))
            totals[c.operation, over] = tensors + c.times, sent + c.times * wire_bytes(c)
    return totals


def describe_sent(sent: exact.Sent, mesh: Mapping[str, int]) -> Collective:
    """Returns what the exact interpreter has sent on a mesh as the collective of a compiled program."""
    names, shape = tuple(mesh), tuple(mesh.values())
    groups = groups_over(sent.axes, shape, names)
    if sent.pairs:
        groups = tuple((group[sender], group[receiver]) for group in groups for sender, receiver in sent.pairs)
    return Collective(sent.operation, DTYPES[sent.dtype], sent.shape, groups, sent.times > 1, sent.times)


def groups_over(
    axes: tuple[str, ...], mesh_shape: tuple[int, ...], names: tuple[str, ...] = AXES
) -> tuple[tuple[int, ...], ...]:
    """Returns the groups of devices that exchange tensors over these axes."""
    dimensions = [names.index(axis) for axis in axes]
    devices = np.moveaxis(np.arange(math.prod(mesh_shape)).reshape(mesh_shape), dimensions, range(-len(axes), 0))
    return _rows(devices, math.prod(mesh_shape[d] for d in dimensions))


def _second(tuple_type: str) -> str:
    """Returns the second element of a tuple type, which may be a tuple itself."""
    depth, element = 0, 0
    second = ""
    for character in tuple_type[1:-1]:
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(character, 0)
        element += character == "," and depth == 0
        second += character if element == 1 else ""
    return second


def _groups(text: str, devices: int) -> tuple[tuple[int, ...], ...]:
    if devices and _ALL.search(text):
        return (tuple(range(devices)),)
    if listed := _LISTED.search(text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := _IOTA.search(text):
        shape, order, transposed = iota.groups()
        return _rows(_devices(order, transposed), _parse_integers(shape)[-1])
    if mesh := _MESH.search(text):
        axes, order, transposed, exchanged = mesh.groups()
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", axes)}
        order_of_devices = _devices(order or str(math.prod(sizes.values())), transposed)
        names = re.findall(r"\w+", exchanged)
        placed = np.moveaxis(
            order_of_devices.reshape(list(sizes.values())),
            [list(sizes).index(axis) for axis in names],
            range(-len(names), 0),
        )
        return _rows(placed, math.prod(sizes[axis] for axis in names))
    raise ValueError(f"no replica groups of a known form in {text[:300]!r}; add them to {__name__}")


def _devices(order: str, transposed: str | None) -> np.ndarray:
    devices = np.arange(math.prod(_parse_integers(order))).reshape(_parse_integers(order))
    return devices.transpose(_parse_integers(transposed)) if transposed else devices


def _rows(devices: np.ndarray, width: int) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, devices.reshape(-1, width).tolist()))


def _parse_integers(text: str) -> list[int]:
    return [int(n) for n in text.split(",")]
