"""What crosses the wire, read from compiled HLO: in tensors and bytes, since XLA merges operations."""

import math
import re
from typing import NamedTuple

import numpy as np

BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%?([\w.\-]+) .*\{$")
_COLLECTIVE = re.compile(
    r"= (.+?) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\((.*)$"
)
_TENSOR = re.compile(r"\b([a-z]+\d*)\[([\d,]*)\]")
_LISTED = re.compile(r"replica_groups=\{(\{[\d,{}]*\})\}")
_IOTA = re.compile(r"replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")


class Collective(NamedTuple):
    """One tensor that crosses devices."""

    operation: str
    dtype: str
    shape: tuple[int, ...]  # as each device holds the result
    groups: tuple[tuple[int, ...], ...]  # the devices that exchange it
    in_loop: bool  # once per iteration of a scan

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * BYTES[self.dtype]

    def over(self, mesh_shape: tuple[int, int]) -> str:
        """The mesh axes that it crosses: 'dp', 'mp', 'dp mp', or '' within one device."""
        at = [
            np.argwhere(np.arange(math.prod(mesh_shape)).reshape(mesh_shape) == device)[0] for device in self.groups[0]
        ]
        moving = (np.stack(at) != at[0]).any(axis=0)
        return " ".join(axis for axis, moves in zip(("dp", "mp"), moving, strict=True) if moves)


def of(hlo: str) -> list[Collective]:
    """Every tensor of every collective in the text of a compiled module."""
    bodies = set(re.findall(r"\bbody=%?([\w.\-]+)", hlo))
    found, computation = [], ""
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            computation = header[1]
        elif match := _COLLECTIVE.search(line):
            result, operation, rest = match.groups()
            for dtype, dims in _TENSOR.findall(result):
                shape = tuple(int(n) for n in dims.split(",") if n)
                found.append(Collective(operation, dtype, shape, _groups(rest), computation in bodies))
    return found


def _groups(text: str) -> tuple[tuple[int, ...], ...]:
    if listed := _LISTED.search(text):
        return tuple(tuple(map(int, group.split(","))) for group in re.findall(r"\{([\d,]+)\}", listed[1]))
    if iota := _IOTA.search(text):
        shape, order, transposed = ([int(n) for n in part.split(",")] if part else None for part in iota.groups())
        devices = np.arange(math.prod(order)).reshape(order)
        if transposed:
            devices = devices.transpose(transposed)
        return tuple(map(tuple, devices.reshape(shape).tolist()))
    return ((0,),)
