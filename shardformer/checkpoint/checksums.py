"""The bytes of a slice in blocks, each with a checksum of its own, so that each may be read alone."""

import zlib

import numpy as np

BLOCK = 4 * 2**20  # bytes: few enough to read little beyond what is needed, many enough that Python costs nothing
_WORDS = 1024  # of 64 bits in a row


def checksum(block: np.ndarray) -> int:
    """Of bytes, as rows of words: the crc32 of the sums of the rows, and that of the sums of the columns.

    A crc32 of every byte takes longer than reading them, and this a third of it. Any three words may change, or any two
    pages change places, and a sum changes. What leaves all sums as they were is four words or more that cancel out,
    two at least in each row and in each column that has any.
    """
    end = len(block) // (8 * _WORDS) * 8 * _WORDS
    words = block[:end].view("<u8").reshape(-1, _WORDS)
    of_rows, of_columns = np.add.reduce(words, 1), np.add.reduce(words, 0)
    return zlib.crc32(of_rows) << 32 | zlib.crc32(block[end:], zlib.crc32(of_columns))


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
