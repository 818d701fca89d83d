"""The bytes of a slice in blocks, each with a checksum of its own, so that each can be read and verified alone."""

import zlib

import numpy as np

BLOCK = 4 * 2**20  # bytes: few enough to read little beyond what is needed, many enough that Python costs nothing
_ROW = 1024  # words of 64 bits


def compute_checksum(block: np.ndarray) -> int:
    """The crc32 of the sums of the rows of a matrix of words, and the crc32 of the sums of its columns.

    512 MiB in 2 threads on 2 cores: 7.1 GB/s, where zlib.crc32 of every byte takes 2.1 GB/s and a copy 7.1. Every
    change of up to three words is noticed, and so are two pages that change places. Not noticed are changes of four
    words or more that cancel out in every row and in every column.
    """
    end = len(block) // (8 * _ROW) * 8 * _ROW
    words = block[:end].view("<u8").reshape(-1, _ROW)
    row_sums, column_sums = np.add.reduce(words, 1), np.add.reduce(words, 0)
    return zlib.crc32(row_sums) << 32 | zlib.crc32(block[end:], zlib.crc32(column_sums))


def checksum_blocks(data: np.ndarray) -> tuple[int, ...]:
    return tuple(
        compute_checksum(data[slice(*block_bounds(number, data.size))]) for number in range(count_blocks(data.size))
    )


def block_bounds(number: int, nbytes: int) -> tuple[int, int]:
    return number * BLOCK, min((number + 1) * BLOCK, nbytes)


def count_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def find_blocks(shape: tuple[int, ...], itemsize: int, box: tuple[tuple[int, int], ...]) -> list[int]:
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
