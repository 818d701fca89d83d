"""The keys of the commands that plan, compare and draw. Imports no JAX."""

import dataclasses

from shardformer import storage
from shardformer.config.keys import key
from shardformer.config.parsing import PICTURES
from shardformer.errors import UsageError


@dataclasses.dataclass(frozen=True)
class PlanOptions:
    """The chips (besides every key of a run)."""

    chip: str = key("v5e:2x4", "chips and their topology, such as v4:2x2x2, v5e:4x4, v5p:4x4x4, v6e:2x4, h100:8")
    compiler: str = key(
        "auto",
        "libtpu, cpu, none (estimates only, in seconds), or auto: libtpu if installed, else cpu for few devices",
    )
    sweep: bool = key(
        False, "rank all dp x mp meshes, with and without ZeRO and remat, by predicted time, without compiling"
    )
    picture: str = key("", "with sweep=true: a picture to write, such as plan.png")
    tokens: float | None = key(
        None, "tokens of the run, such as 2e12: prints the days that they take at the forecast speed", none="none"
    )
    price: float | None = key(None, "price of a chip for an hour, in any currency: prints the cost", none="none")

    def __post_init__(self) -> None:
        if self.compiler not in ("auto", "libtpu", "cpu", "none"):
            raise UsageError(f"compiler is one of auto, libtpu, cpu, none; got {self.compiler!r}")
        if self.picture and not self.sweep:
            raise UsageError("picture= draws a sweep; give sweep=true as well")
        for name in ("tokens", "price"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be above 0, or none, got {value}")
        if self.price and not self.tokens:
            raise UsageError("price is for the chips of a number of tokens; give tokens= as well")
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


@dataclasses.dataclass(frozen=True)
class MemoryOptions:
    """The picture (besides every key of a run)."""

    picture: str = key("memory.png", "picture to write; empty draws none")

    def __post_init__(self) -> None:
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


@dataclasses.dataclass(frozen=True)
class CoordinateOptions:
    """The sizes and the picture (besides every key of a run)."""

    widths: str = key("", "values of d_model to compare, such as 64,128,256; heads become as many times more")
    depths: str = key("", "values of layers to compare, such as 2,4,8")
    steps: int = key(6, "steps on one batch of random tokens", least=1, below=1001)
    picture: str = key("coordinates.png", "picture to write; empty draws none")

    def __post_init__(self) -> None:
        if not (self.widths or self.depths):
            raise UsageError("coordinates compares sizes; give widths=64,128,256 or depths=2,4,8, or both")
        for name in ("widths", "depths"):
            sizes = getattr(self, name).split(",") if getattr(self, name) else []
            if not all(size.isdecimal() and int(size) for size in sizes) or len(sizes) == 1:
                raise UsageError(f"{name} takes two or more sizes, such as 64,128,256; got {getattr(self, name):.80}")
        storage.new_file_on_disk(self.picture, "picture", PICTURES)


@dataclasses.dataclass(frozen=True)
class VerifyOptions:
    """Options of a comparison (besides every key of a run)."""

    exact: bool = key(False, "in float64, on any mesh, without devices; also one device, and complete steps")
    memory: float = key(8.0, "GB that arrays may take with exact=true", least=0.1)


@dataclasses.dataclass(frozen=True)
class ExplainOptions:
    """The pictures."""

    pictures: str = key("", "folder for one picture of each way; empty draws none")

    def __post_init__(self) -> None:
        folder = storage.on_disk(self.pictures, "pictures")
        if not next(path for path in (folder, *folder.parents) if path.exists()).is_dir():
            raise UsageError(f"pictures={self.pictures} is a file, or inside one; name a folder")


@dataclasses.dataclass(frozen=True)
class PlotOptions:
    """The picture."""

    by: str = key("step", "the horizontal axis: step, tokens or time")
    out: str = key("runs.png", "the picture to write")

    def __post_init__(self) -> None:
        if not storage.on_disk(self.out, "out").name:
            raise UsageError(f"out takes the name of a picture, such as runs.png; got {self.out!r}")
        storage.new_file_on_disk(self.out, "out", PICTURES)


@dataclasses.dataclass(frozen=True)
class InspectOptions:
    """The arrays to read."""

    norms: bool = key(True, "read every array: its norm, its largest number, and whether its bytes are intact")


@dataclasses.dataclass(frozen=True)
class DiffOptions:
    """The list of differences."""

    most: int = key(50, "arrays to list, in order of decreasing difference")

    def __post_init__(self) -> None:
        if self.most < 0:
            raise UsageError(f"most must not be negative, got {self.most}")
