"""The parts of a large file of a checkpoint.

In a bucket, a large file is two or more objects of equal size, and a copy of it on a disk is as many files. The name of
their folder states the size of the parts, so that a run can be copied between a disk and a bucket as it is.
"""

import itertools
import re
from collections.abc import Iterable, Iterator, Mapping

from shardformer.checkpoint.store import LocationT

_FOLDER = re.compile(r"[0-9a-f]+-parts-of-([1-9]\d{0,17})")


def folder_name(token: str, part_bytes: int) -> str:
    return f"{token}-parts-of-{part_bytes}"


def part_bytes(folder: LocationT) -> int | None:
    """Returns the size of the parts of the files in a folder; None if its files are not split."""
    match = _FOLDER.fullmatch(folder.name)
    return int(match[1]) if match else None


def part(path: LocationT, number: int) -> LocationT:
    """Returns the path of one part of a file."""
    return path.parent / part_name(path.name, number)


def locate(path: LocationT, offset: int, length: int) -> Iterator[tuple[LocationT, int, int]]:
    """Yields the (path, offset, length) of the reads that give a range of a file, split or not."""
    size = part_bytes(path.parent)
    if size is None:
        yield path, offset, length
        return
    end = offset + length
    while offset < end:
        number, start = divmod(offset, size)
        count = min(size - start, end - offset)
        yield part(path, number), start, count
        offset += count


def add_up(names: Iterable[str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the bytes of each file by those of its parts, up to the first missing part."""
    total = {}
    for name in names:
        parts = itertools.takewhile(sizes.__contains__, (part_name(name, number) for number in itertools.count()))
        if result := [sizes[part] for part in parts]:
            total[name] = sum(result)
    return total


def part_name(name: str, number: int) -> str:
    return f"{name}.{number:05d}"
