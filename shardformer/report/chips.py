"""What chips can do: the one table of their constants, each with its source; and a slice of them by name."""

import math
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.parsing import shorten, suggest_closest

GiB = 2**30
MOST_CHIPS = 2**18
RESERVED = GiB // 4  # of a TPU's memory: its compiler for v5e reports 15.75 GiB of 16 as its limit


class Chip(NamedTuple):
    """Peak rates of one chip; a plan measured against them is a bound, not a promise."""

    flops: float  # dense bf16, per second
    memory: float  # bytes
    bandwidth: float  # of the memory, bytes per second
    wire: float  # all links of the chip together, one direction, bytes per second
    dimensions: int  # of its torus; 0: a switch, every chip reaches every other at full speed
    source: str


CHIPS = {
    "v4": Chip(275e12, 32 * GiB - RESERVED, 1228e9, 300e9, 3, "cloud.google.com/tpu/docs/v4: ICI 2400 Gbps"),
    "v5e": Chip(197e12, 16 * GiB - RESERVED, 819e9, 200e9, 2, "cloud.google.com/tpu/docs/v5e: ICI 400 GB/s, two ways"),
    "v5p": Chip(
        459e12, 95 * GiB - RESERVED, 2765e9, 600e9, 3, "cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s, two ways"
    ),
    "v6e": Chip(918e12, 32 * GiB - RESERVED, 1640e9, 448e9, 2, "cloud.google.com/tpu/docs/v6e: ICI 3584 Gbps"),
    "a100": Chip(312e12, 80e9, 2039e9, 300e9, 0, "NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s both ways"),
    "h100": Chip(989e12, 80e9, 3350e9, 450e9, 0, "NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways"),
    "h200": Chip(989e12, 141e9, 4800e9, 450e9, 0, "NVIDIA H200 SXM data sheet: NVLink 900 GB/s both ways"),
}
# By what `device_kind` contains; the first that matches, and v5p calls itself "TPU v5".
DEVICE_KINDS = {
    "H100": "h100", "H200": "h200", "A100": "a100",
    "v6": "v6e", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v4": "v4",
}  # fmt: skip


class Slice(NamedTuple):
    """Chips that are bought together: v5e:4x4."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def is_tpu(self) -> bool:
        return self.chip.dimensions > 0

    def __str__(self):
        return f"{self.name}:{'x'.join(map(str, self.shape))}"


def find_chip(device_kind: str) -> Chip | None:
    """By JAX's name of a device; None where the table has none."""
    name = next((name for part, name in DEVICE_KINDS.items() if part.lower() in device_kind.lower()), None)
    return CHIPS.get(name)


def parse_slice(text: str) -> Slice:
    """'v5e:4x4', 'h100:8'."""
    name, _, shape = text.lower().partition(":")
    if name not in CHIPS:
        raise UsageError(f"chip takes NAME:SHAPE with a name of {', '.join(CHIPS)}; got {shorten(text)}"
                         f"{suggest_closest(name, CHIPS)}")  # fmt: skip
    chip = CHIPS[name]
    sizes = shape.split("x")
    dimensions = chip.dimensions or 1
    valid = all(size.isascii() and size.isdecimal() and 0 < len(size) < 6 and int(size) > 0 for size in sizes)
    if not valid or len(sizes) != dimensions:
        raise UsageError(f"{name} has {dimensions} dimension{'s' if dimensions > 1 else ''}; write chip={name}:"
                         f"{_nearest_shape(sizes if valid else [], dimensions)}; got {shorten(text)}")  # fmt: skip
    found = Slice(name, chip, tuple(map(int, sizes)))
    if found.count > MOST_CHIPS:  # every way to split them would be looked at
        raise UsageError(f"chip={shorten(text)} is {found.count:,} chips; a plan is for at most {MOST_CHIPS:,}")
    return found


def _nearest_shape(sizes: list[str], dimensions: int) -> str:
    """As many chips in the right number of dimensions, as even as powers of two go."""
    count = math.prod(map(int, sizes)) if sizes else 8
    power = max(count - 1, 1).bit_length() if count > 1 else 0
    return "x".join(str(2 ** (power // dimensions + (i >= dimensions - power % dimensions))) for i in range(dimensions))
