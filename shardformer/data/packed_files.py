"""Files that may be packed (.gz, .zst), read as their unpacked bytes."""

import contextlib
import gzip
import io
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from shardformer.errors import UsageError

PACKED = (".gz", ".zst")
BUFFER = 1 << 20  # bytes that are read ahead


class Expansion(NamedTuple):
    """The bounds of the growth of a packed file."""

    most: int = 200  # times its size, beyond its first `free_bytes`
    free_bytes: int = 16 << 20


EXPANSION = Expansion()


def find_suffix(path: Path) -> str:
    """Returns the suffix of the unpacked file, in small letters."""
    return (path.with_suffix("") if path.suffix in PACKED else path).suffix.lower()


@contextlib.contextmanager
def open_unpacked(path: Path, advance: Callable[[int], object]) -> Iterator[BinaryIO]:
    """Opens a file, unpacked as it is read; a file that grows more than text does raises UsageError."""
    with io.BufferedReader(_Counted(path, advance), BUFFER) as stored:
        if path.suffix == ".gz":
            with gzip.open(stored, "rb") as file:
                yield io.BufferedReader(_Bounded(file, path), BUFFER)
        elif path.suffix == ".zst":
            yield io.BufferedReader(_Bounded(_ZstdReader(stored, path), path), BUFFER)
        else:
            yield stored


class _Counted(io.FileIO):
    """A file that reports how many of its bytes have been read."""

    def __init__(self, path: Path, advance: Callable[[int], object]):
        super().__init__(path, "rb")
        self._advance = advance

    def readinto(self, buffer) -> int | None:
        count = super().readinto(buffer)
        self._advance(count or 0)
        return count


def check_expansion(path: Path, unpacked: int) -> None:
    """Raises UsageError if a packed file grows more than text does: a decompression bomb would fill the disk."""
    if unpacked > EXPANSION.free_bytes + EXPANSION.most * path.stat().st_size:
        raise UsageError(
            f"{path} grows more than {EXPANSION.most} times when it is unpacked, which no text does; "
            "unpack it yourself if this is meant"
        )


class _Bounded(io.RawIOBase):
    """The unpacked bytes of a packed file, rejected as soon as it has grown too much."""

    def __init__(self, file: "gzip.GzipFile | _ZstdReader", path: Path):
        self._file, self._path, self._unpacked = file, path, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:
        content = self._file.read(len(buffer))
        self._unpacked += len(content)
        check_expansion(self._path, self._unpacked)
        buffer[: len(content)] = content
        return len(content)


class _ZstdReader:
    """The unpacked bytes of a .zst file; raises UsageError if the file is truncated."""

    CHUNK = 4096  # packed bytes at once: unpacked they are 128 MB at the very most

    def __init__(self, file, path: Path):
        try:
            import zstandard
        except ModuleNotFoundError:
            raise UsageError(
                f"{path} needs the package zstandard to be unpacked: pip install zstandard, or unpack it: unzstd {path}"
            ) from None
        self._package, self._file, self._path = zstandard, file, path
        self._frame: Any = None
        self._unread, self._waiting = b"", memoryview(b"")

    def read(self, size: int):
        while not self._waiting:
            packed = self._unread or self._file.read(self.CHUNK)
            if not packed:
                if self._frame and not self._frame.eof:
                    raise UsageError(f"{self._path} is truncated: its last zstd frame is incomplete")
                return b""
            if not self._frame or self._frame.eof:
                self._frame = self._package.ZstdDecompressor().decompressobj()
            try:
                self._waiting = memoryview(self._frame.decompress(packed))
            except self._package.ZstdError as error:
                raise UsageError(f"{self._path} is damaged or not packed by zstd: {error}") from None
            self._unread = self._frame.unused_data
        result, self._waiting = self._waiting[:size], self._waiting[size:]
        return result
