"""The constants of chips, each with its source, the slices that are named by them, and options of their compilers.

Each option of XLA's compiler has the gain that the compiler's schedule shows: `gptj_6b` with `grad_dtype=bfloat16`,
libtpu 0.0.52, by `plan`; analysis/wire_time.py has the method.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import NamedTuple

import jax
from jax.sharding import AbstractMesh, Mesh

from shardformer.config.parsing import shorten, suggest_closest
from shardformer.errors import UsageError

GiB, MiB = 2**30, 2**20
RESERVED = GiB // 4  # of a TPU's memory: its compiler for v5e reports 15.75 GiB of 16 as its limit
GPU_SHARE = 0.75  # of a GPU's memory: JAX's limit unless XLA_PYTHON_CLIENT_MEM_FRACTION is set
GPUS_OF_A_NODE = 8
# Bytes per second each way between a chip and its host's memory: of a v4 ("16GB / second each way" by
# jax-ml.github.io/scaling-book/tpus, assumed of every TPU), and of 16 lanes of PCIe 3, 4 or 5 by the GPUs' data sheets.
TPU_HOST_LINK, PCIE_3, PCIE_4, PCIE_5 = 16e9, 16e9, 32e9, 64e9
GPU_NETWORK = 400e9 / 8  # between nodes, bytes per second for each GPU; an assumption, which `source` states


class Chip(NamedTuple):
    """Peak rates of one chip, or of each of the `devices` that JAX sees in it.

    A plan measured against them is a bound, not a promise.
    """

    flops: float  # dense bf16, per second
    memory: float  # bytes that a program may have
    bandwidth: float  # of the memory, bytes per second
    wire: float  # all links of the chip together, one direction, bytes per second
    dimensions: int  # of its torus; 0: a switch joins them
    fast_memory: float  # bytes on the chip itself that XLA places arrays in, instead of in `memory`
    source: str
    host: int = 0  # chips that `wire` joins, while the network joins the others; 0: `wire` joins a full slice
    network: float = 0.0  # between hosts, one direction, bytes per second for each chip
    capability: float = 0.0  # compute capability of an NVIDIA GPU
    clock: float = 0.0  # cycles per second of a TPU, from its peak and its matrix units
    devices: int = 1  # of one chip
    host_link: float = TPU_HOST_LINK  # between a device and its host's memory, each way, bytes per second
    exchanging: int = 0  # chips of a slice up to which an all-to-all overlaps with arithmetic; 0: any number
    matrix_side: int = 128  # rows and columns of a TPU's matrix unit

    @property
    def axis_wire(self) -> float:
        """Bytes per second over the links of one dimension of the torus, or through the switch."""
        return self.wire / max(self.dimensions, 1)


def _gpu(
    flops: float, memory: float, bandwidth: float, wire: float, capability: float, data_sheet: str, pcie: float = PCIE_5
) -> Chip:
    source = (
        f"{data_sheet}; {GPU_SHARE:.0%} of its {memory / 1e9:g} GB, which JAX takes unless "
        f"XLA_PYTHON_CLIENT_MEM_FRACTION says otherwise; assumed: nodes of {GPUS_OF_A_NODE} GPUs, with a network of "
        f"{GPU_NETWORK * 8 / 1e9:g} Gbit/s for each GPU between them, which the GPUs of one node share"
    )
    return Chip(
        flops,
        GPU_SHARE * memory,
        bandwidth,
        wire,
        0,
        0,
        source,
        GPUS_OF_A_NODE,
        GPU_NETWORK,
        capability,
        host_link=pcie,
    )


SYSTOLIC = 2 * 128 * 128  # FLOPs of a cycle of a matrix unit; a v6e's has four times as many
# Fast memory (VMEM, and CMEM of a v4) by jax.experimental.pallas.tpu.get_tpu_info; the rest by the source of each line.
CHIPS = {
    "v3": Chip(123e12 / 2, 16 * GiB - RESERVED, 900e9 / 2, 4 * 82e9 / 2, 2, 16 * MiB,
               "cloud.google.com/tpu/docs/v3, half of a chip, as JAX sees it (v3-8 is v3:2x2); four links of 656 "
               "Gbit/s by Norrie et al. 2021; unconfirmed: the reserved memory is assumed, and today's libtpu may not "
               "run it",
               clock=123e12 / 2 / (2 * SYSTOLIC), devices=2, host_link=TPU_HOST_LINK / 2),
    "v4": Chip(275e12, 32 * GiB - RESERVED, 1228e9, 300e9, 3, 134e6 + 32 * MiB,
               "cloud.google.com/tpu/docs/v4: ICI 2400 Gbps", clock=275e12 / (8 * SYSTOLIC)),
    "v5e": Chip(197e12, 16 * GiB - RESERVED, 819e9, 200e9, 2, 128 * MiB,
                "cloud.google.com/tpu/docs/v5e: ICI 400 GB/s, two ways", clock=197e12 / (4 * SYSTOLIC), exchanging=16),
    "v5p": Chip(459e12, 95 * GiB - RESERVED, 2765e9, 600e9, 3, 128 * MiB,
                "cloud.google.com/tpu/docs/v5p: ICI 1200 GB/s, two ways", clock=459e12 / (8 * SYSTOLIC)),
    "v6e": Chip(918e12, 32 * GiB - RESERVED, 1600e9, 400e9, 2, 128 * MiB,
                "docs.cloud.google.com/tpu/docs/v6e: ICI 800 GB/s, two ways", clock=918e12 / (4 * 4 * SYSTOLIC),
                matrix_side=256),
    "tpu7x": Chip(2307e12 / 2, 96 * GiB - RESERVED, 7380e9 / 2, 600e9 / 2, 3, 64 * MiB,
                  "docs.cloud.google.com/tpu/docs/tpu7x, half of a chip: ICI 1200 GB/s, two ways; unconfirmed: no step "
                  "was measured, and the clock, the fast memory and the reserved memory are assumed",
                  clock=2307e12 / 2 / (4 * 4 * SYSTOLIC), devices=2, host_link=TPU_HOST_LINK / 2, matrix_side=256),
    "a100": _gpu(312e12, 80e9, 2039e9, 300e9, 8.0, "NVIDIA A100 80GB SXM data sheet: NVLink 600 GB/s both ways",
                 PCIE_4),
    "h100": _gpu(989e12, 80e9, 3350e9, 450e9, 9.0, "NVIDIA H100 SXM data sheet: NVLink 900 GB/s both ways"),
    "h200": _gpu(989e12, 141e9, 4800e9, 450e9, 9.0, "NVIDIA H200 SXM data sheet: NVLink 900 GB/s both ways"),
    "rtx4090": _gpu(165e12, 24e9, 1008e9, 32e9, 8.9, "NVIDIA Ada whitepaper, RTX 4090: PCIe 64 GB/s both ways",
                    PCIE_4),
    "t4": _gpu(65e12, 16e9, 320e9, 16e9, 7.5, "NVIDIA T4 data sheet: float16, as it multiplies no bfloat16; PCIe 3 "
               "32 GB/s both ways", PCIE_3),
    "a10g": _gpu(70e12, 24e9, 600e9, 32e9, 8.6, "NVIDIA A10G data sheet (AWS g5): PCIe 64 GB/s both ways", PCIE_4),
    "l4": _gpu(121e12, 24e9, 300e9, 32e9, 8.9, "NVIDIA L4 data sheet: PCIe 64 GB/s both ways", PCIE_4),
    "l40s": _gpu(362e12, 48e9, 864e9, 32e9, 8.9, "NVIDIA L40S data sheet: PCIe 64 GB/s both ways", PCIE_4),
    "b200": _gpu(2250e12, 180e9, 8000e9, 900e9, 10.0, "NVIDIA HGX B200 data sheet: NVLink 1.8 TB/s both ways"),
    "mi300x": _gpu(1307e12, 192e9, 5300e9, 448e9, 0.0, "AMD Instinct MI300X data sheet: seven links of 128 GB/s both "
                   "ways; its capability is AMD's, which no choice of kernels knows"),
}  # fmt: skip
LARGEST = {
    "v4": 4096,
    "v5p": 6144,
    "tpu7x": 9216,
}  # chips of one slice, by the same sources; a v5e and a v6e have up to 16 x 16
MOST_GPUS = 2**14  # of a plan
# Parts of `device_kind`; the first match counts, and v5p is named "TPU v5". None: another product with a similar name,
# whose rates differ from the table.
DEVICE_TYPES: dict[str, str | None] = {
    "H100 PCIe": None, "H100 NVL": None, "H200 NVL": None, "GH200": None, "GB200": None,
    "RTX 4090 Laptop": None, "RTX 4090 D": None, "RTX 4090": "rtx4090", "L40S": "l40s",
    "B200": "b200", "H100": "h100", "H200": "h200", "A100": "a100", "MI300X": "mi300x",
    "A10G": "a10g", "Tesla T4": "t4", "NVIDIA L40": None, "NVIDIA L4": "l4",
    "TPU v3": "v3", "TPU7x": "tpu7x", "v6": "v6e", "v5 lite": "v5e", "v5e": "v5e", "v5": "v5p", "v4": "v4",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Slice:
    """Chips that are bought together, for example v5e:4x4."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def count(self) -> int:
        """The number of JAX's devices."""
        return math.prod(self.shape) * self.chip.devices

    @property
    def is_tpu(self) -> bool:
        return self.chip.dimensions > 0

    @property
    def platform(self) -> str:
        """JAX's name of the platform."""
        return "tpu" if self.is_tpu else "gpu"

    def __str__(self):
        return f"{self.name}:{'x'.join(map(str, self.shape))}"


def find_chip(device_kind: str) -> Chip | None:
    """Returns the chip of JAX's name of a device; None if the table has none."""
    name = next((name for part, name in DEVICE_TYPES.items() if part.lower() in device_kind.lower()), None)
    return CHIPS[name] if name else None


def parse_slice(text: str) -> Slice:
    """Returns the slice of a name like 'v5e:4x4' or 'h100:8'."""
    name, _, shape = text.lower().partition(":")
    if name not in CHIPS:
        raise UsageError(f"chip takes NAME:SHAPE with a name of {', '.join(CHIPS)}; got {shorten(text)}"
                         f"{suggest_closest(name, CHIPS, cutoff=0.6)}")  # fmt: skip
    chip, sizes = CHIPS[name], shape.split("x")
    dimensions = chip.dimensions or 1
    valid = all(size.isascii() and size.isdecimal() and 0 < len(size) < 6 and int(size) > 0 for size in sizes)
    asked = tuple(map(int, sizes)) if valid else ()
    nearest = f"write chip={name}:{'x'.join(map(str, _nearest_shape(name, asked)))}; got {shorten(text)}"
    if len(asked) != dimensions:
        raise UsageError(f"{name} has {dimensions} dimension{'s' if dimensions > 1 else ''}; {nearest}")
    if chip.dimensions and asked not in _shapes(name):
        largest = math.prod(_shapes(name)[-1])
        raise UsageError(f"{name} has no slice of this shape, and its largest has {largest:,} chips; {nearest}")
    if not chip.dimensions and math.prod(asked) > MOST_GPUS:  # a plan tries every split of them
        raise UsageError(f"chip={shorten(text)} is {math.prod(asked):,} chips; a plan is for at most {MOST_GPUS:,}")
    return Slice(name, chip, asked)


def larger_slices(chips: Slice) -> Iterator[Slice]:
    """Yields slices of twice as many chips, four times as many, and so on, up to the largest that is sold."""
    count = 2 * math.prod(chips.shape)
    while count <= (math.prod(_shapes(chips.name)[-1]) if chips.is_tpu else MOST_GPUS):
        yield dataclasses.replace(chips, shape=_nearest_shape(chips.name, (count,)))
        count *= 2


@functools.cache
def _shapes(name: str) -> list[tuple[int, ...]]:
    """Returns the shapes of a TPU's slices, smallest first."""
    if name == "v3":
        return [(2, 2), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16), (16, 32), (32, 32)]
    if CHIPS[name].dimensions == 2:
        return [(1, 1), (2, 2), (2, 4), (4, 4), (4, 8), (8, 8), (8, 16), (16, 16)]
    sides = range(4, 25, 4)  # above 64 chips, of cubes of 4 x 4 x 4
    cubes = [(a, b, c) for a in sides for b in sides for c in sides if a <= b <= c]
    sold = [shape for shape in cubes if math.prod(shape) <= LARGEST[name]]
    return [(2, 2, 1), (2, 2, 2), (2, 2, 4), (2, 4, 4), *sorted(sold, key=math.prod)]


def _nearest_shape(name: str, asked: tuple[int, ...]) -> tuple[int, ...]:
    """Returns the most even shape with the nearest number of chips; the default is 8 chips."""
    count = math.prod(asked) if asked else 8
    if not CHIPS[name].dimensions:
        return (count,)

    def distance(shape: tuple[int, ...]) -> tuple[float, float]:
        return abs(math.log(math.prod(shape) / count)), max(shape) / min(shape)

    return min(_shapes(name), key=distance)


# Exchanges of gradients (parallel/scattering.py) overlap with matmuls: 121 ms less exposed on v5e:4x4. libtpu
# refuses it for larger slices of v5e.
EXCHANGING = {"xla_tpu_enable_async_all_to_all": "true"}
OPTIONS = {
    # A fusion may take twice as much fast memory, so that XLA finds better tiles: 22 ms of cycles and 12 ms of exposed
    # wire less on v5e:4x4.
    "v5e": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
    # For the same reason: 296 ms of cycles less on v5p:4x4x4, of 2,226 in all (libtpu 0.0.42.1, 8 rows a chip).
    "v5p": {"xla_tpu_scoped_vmem_limit_kib": "32768"},
    # Gathers of parameters start early, as on a v5e without an option: 70 ms less exposed on v4:2x2x4.
    "v4": {"xla_enable_async_all_gather": "true"},
}


def find_options(device_mesh: Mesh | AbstractMesh) -> dict[str, str] | None:
    """Returns the options for a program of these devices; None if they are no TPUs."""
    if isinstance(device_mesh, AbstractMesh):
        return None
    device = device_mesh.devices.flat[0]
    if device.platform != "tpu":
        return None
    chip = find_chip(device.device_kind)
    exchanging = EXCHANGING if not chip or device_mesh.size <= (chip.exchanging or device_mesh.size) else {}
    return exchanging | next((options for name, options in OPTIONS.items() if CHIPS[name] is chip), {})


class Hardware(NamedTuple):
    """The properties of a device on which choices of kernels and collectives depend."""

    platform: str
    capability: float = 0.0  # compute capability of an NVIDIA GPU
    flops: float = 0.0  # per second; 0: unknown
    wire: float = 0.0  # bytes per second over the links of one mesh axis; 0: unknown
    exchanging: int = 0  # TPUs of a slice up to which an all-to-all overlaps with arithmetic; 0: any number

    @classmethod
    def of_device(cls, device: jax.Device) -> "Hardware":
        try:
            capability = float(getattr(device, "compute_capability", 0))
        except ValueError:  # AMD's are names
            capability = 0.0
        return cls(device.platform, capability)


CPU = Hardware("cpu")


def describe_hardware(device: jax.Device) -> Hardware:
    """Returns the properties of a device, with the rates of its chip if the table has it."""
    hardware, chip = Hardware.of_device(device), find_chip(device.device_kind)
    return describe_chip(device.platform, chip)._replace(capability=hardware.capability) if chip else hardware


def describe_chip(platform: str, chip: Chip) -> Hardware:
    """Returns the properties of a device of this chip."""
    return Hardware(platform, chip.capability, chip.flops, chip.axis_wire, chip.exchanging)
