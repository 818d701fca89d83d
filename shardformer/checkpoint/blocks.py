"""The bytes of a slice in blocks, each with a checksum of its own, so that each may be read alone."""

import zlib

import numpy as np

BLOCK = 4 * 2**20  # bytes: few enough to read little beyond what is needed, many enough that Python costs nothing
_ROW = 2**14


def checksum(block: np.ndarray) -> int:
    """Of bytes: the crc32 of the sum of their rows of 16 KiB as 64-bit words, and of what is left after the last row.

    A crc32 of every byte takes twice as long as reading them, and this a third. An error within any 16 KiB changes
    one word of a column at most, and so always the sum; all that it cannot see is whole rows in another order.
    """
    rows = len(block) // _ROW * _ROW
    words = block[:rows].view("<u8").reshape(-1, _ROW // 8)
    return zlib.crc32(block[rows:], zlib.crc32(words.sum(axis=0, dtype=np.uint64)))


def bounds(number: int, nbytes: int) -> tuple[int, int]:
    return number * BLOCK, min((number + 1) * BLOCK, nbytes)


def count(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def checksums(data: np.ndarray) -> tuple[int, ...]:
    """Of all blocks of some bytes."""
    return tuple(checksum(data[slice(*bounds(number, data.size))]) for number in range(count(data.size)))


def touched(shape: tuple[int, ...], itemsize: int, box: tuple[tuple[int, int], ...]) -> list[int]:
    """The blocks that hold a box of a C-ordered array; the box is not empty."""
    starts, length, stride = np.zeros(1, np.int64), itemsize, itemsize
    for size, (low, high) in zip(reversed(shape), reversed(box), strict=True):
        if stride <= BLOCK:  # no block lies between neighbours along this axis
            starts, length = starts + low * stride, (high - 1 - low) * stride + length
        else:
            starts = np.add.outer(stride * np.arange(low, high), starts).ravel()
        stride *= size
    firsts, lasts = starts // BLOCK, (starts + length - 1) // BLOCK
    return sorted({block for first, last in zip(firsts, lasts, strict=True) for block in range(first, last + 1)})
