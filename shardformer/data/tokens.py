"""Sequences of token ids, on disk or in memory."""

import contextlib
import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from shardformer.errors import RunError, UsageError

SPLITS = ("train", "validation", "test")
MAX_MAPPED = 256  # files at a time
SAMPLED_BLOCK, SAMPLED_BLOCKS = 1 << 16, 1024


@dataclasses.dataclass(frozen=True, eq=False)
class MappedFile:
    """A file as an array, of which slices are read.

    A mapping keeps its file open, and a large corpus has more files than a process may open: only those that were
    read last are mapped.
    """

    path: Path
    dtype: np.dtype
    length: int
    offset: int = 0  # bytes before the array

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index) -> np.ndarray:
        with contextlib.suppress(FileNotFoundError):  # the mapping keeps the content of a deleted file
            size, needed = self.path.stat().st_size, self.offset + self.length * self.dtype.itemsize
            if size < needed:  # the end of a process by SIGBUS, without a word
                raise RunError(
                    f"{self.path} was cut short: it has {size:,} bytes, expected {needed:,}; bring the file back"
                )
        return _map(self)[index]

    def cut(self, start: int, end: int) -> "MappedFile":
        """Returns the part of the array from `start` to `end`."""
        return MappedFile(self.path, self.dtype, end - start, self.offset + start * self.dtype.itemsize)


@functools.lru_cache(MAX_MAPPED)
def _map(file: MappedFile) -> np.ndarray:
    # Slices of np.memmap itself are slow.
    return np.asarray(np.memmap(file.path, file.dtype, "r", file.offset, (file.length,)))


class Tokens:
    """Arrays of ids joined to one sequence; files are read only where a window needs them."""

    def __init__(self, parts: Sequence[np.ndarray | MappedFile], name: str):
        self.parts, self.name = parts, name
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def take(self, start: int, count: int) -> np.ndarray:
        """Returns `count` ids from `start` on; the sequence must hold them."""
        number = int(np.searchsorted(self._ends, start, side="right"))
        part = self.parts[number]
        offset = start - int(self._ends[number]) + len(part)
        if offset + count <= len(part):
            return part[offset : offset + count]
        head = part[offset:]
        return np.concatenate([head, self.take(start + len(head), count - len(head))])

    def cut(self, start: int, end: int) -> "Tokens":
        """Returns the ids from `start` to `end` as another sequence, without a copy."""
        parts: list[np.ndarray | MappedFile] = []
        position = 0
        for part in self.parts:
            inside = slice(max(start - position, 0), max(min(end - position, len(part)), 0))
            if inside.start < inside.stop:
                mapped = part.cut(inside.start, inside.stop) if isinstance(part, MappedFile) else None
                parts.append(mapped or part[inside])
            position += len(part)
        return Tokens(parts, self.name)


def name_spans(borders: list[int]) -> dict[str, tuple[int, int]]:
    """Returns (start, end) of each split between four borders, without empty splits."""
    spans = zip(SPLITS, borders, borders[1:], strict=False)
    return {name: (start, end) for name, start, end in spans if start < end}


def divide_in_order(size: int, share: float) -> dict[str, tuple[int, int]]:
    """Returns (start, end) of each split of a token file; the last shares are validation and test."""
    return name_spans([0, int(size * (1 - 2 * share)), int(size * (1 - share)), size])


def compact(ids: np.ndarray) -> np.ndarray:
    """Returns the ids in the narrowest type that fits them, as they stay in memory."""
    return ids.astype(np.min_scalar_type(int(ids.max(initial=0))))


def id_type(vocabulary_size: int) -> np.dtype:
    """Returns the type in which a .bin file stores ids."""
    return np.dtype("<u2") if vocabulary_size <= 1 << 16 else np.dtype("<u4")


def open_token_file(path: Path) -> Tokens:
    """Maps nanoGPT's .bin (uint16) or a .npy with one axis of integers into memory."""
    try:
        if path.suffix == ".npy":
            array = np.load(path, mmap_mode="r", allow_pickle=False)
            if array.ndim != 1 or array.dtype.kind not in "iu":
                raise UsageError(f"{path} holds {array.dtype} of shape {array.shape}; expected one axis of integers")
        else:
            size = path.stat().st_size
            if size % 2:
                raise UsageError(
                    f"{path} has {size:,} bytes, an odd number: it is not a sequence of uint16 ids, or it is cut short"
                )
            array = np.memmap(path, "<u2", mode="r") if size else np.zeros(0, np.uint16)
    except UsageError:
        raise
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    except Exception as error:  # numpy parses headers as Python
        raise UsageError(f"{path} is truncated or not a .npy file: {error!s:.200}") from None
    mapped = MappedFile(path, array.dtype, len(array), array.offset) if isinstance(array, np.memmap) else array
    return Tokens([mapped], str(path))


def read_blocks(tokens: Tokens, start: int, end: int, step: int = 1 << 22) -> Iterator[np.ndarray]:
    """Yields the ids from `start` to `end`; raises UsageError for negative ones."""
    for position in range(start, end, step):
        block = tokens.take(position, min(step, end - position))
        if block.dtype.kind == "i" and block.min() < 0:
            raise UsageError(f"{tokens.name} holds negative ids ({block.min()}); token ids begin at 0")
        yield block


def find_largest_id(tokens: Tokens) -> int:
    """Reads all ids and returns the largest one, -1 if there is none."""
    return max((int(block.max()) for block in read_blocks(tokens, 0, len(tokens))), default=-1)


def describe_largest_id(name: str, largest: int, size: int) -> str:
    return (
        f"{name} holds the id {largest}, beyond a vocabulary of {size}; "
        "give the tokenizer that it was made with, or a larger vocab"
    )


def fingerprint_file(path: Path, block: int = SAMPLED_BLOCK, blocks: int = SAMPLED_BLOCKS) -> str:
    """Returns a sha256 of a file's size and content: all of it up to 64 MB, else 1,024 blocks spread over it.

    block, blocks: the size and the number of the blocks.
    """
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(str(size).encode())
        with open(path, "rb") as file:
            if size <= block * blocks:
                digest.update(file.read())
            else:
                for number in range(blocks):
                    file.seek(number * (size - block) // (blocks - 1))
                    digest.update(file.read(block))
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None
    return digest.hexdigest()
