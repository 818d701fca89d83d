"""Data order as a pure function of (seed, position); resuming replays nothing."""

import math
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

ROUNDS = 6  # of the Feistel network, which moves along rows and columns alternately
MAX_PATTERN = 4096  # rows after which a mixture has its weights to 1 in 4,096

_DRAW, _SHIFT, _PATTERN = (np.uint64(number) for number in (1, 2, 3))  # so that no two uses share random values


def scramble(*values) -> np.ndarray:
    """Hashes each row of the values (integers, or arrays of one length) to 64 bits."""
    state = np.zeros(np.broadcast_shapes(*(np.shape(value) for value in values)) or (1,), np.uint64)
    for value in values:
        state = _mix(state ^ np.asarray(value).astype(np.uint64))
    return state


def permute(index: np.ndarray, size: int, key: int) -> np.ndarray:
    """Returns the position of each index in a permutation of range(size), in constant memory.

    A Feistel network over the cells of a grid of `rows` x `columns`, a little larger than `size`: each round moves
    along one axis by an amount that the other decides. Cells past `size` are enciphered again until they are inside.
    """
    rows = np.uint64(math.isqrt(size - 1) + 1)
    columns = np.uint64(-(-size // int(rows)))
    keys = scramble(key, np.arange(ROUNDS))

    def encipher(x):
        row, column = np.divmod(x, columns)
        for moves_row, moves_column in keys.reshape(-1, 2):
            row = (row + _mix(column ^ moves_row) % rows) % rows
            column = (column + _mix(row ^ moves_column) % columns) % columns
        return row * columns + column

    x = encipher(np.asarray(index, np.uint64))
    while (outside := np.flatnonzero(x >= np.uint64(size))).size:
        x[outside] = encipher(x[outside])
    return x.astype(np.int64)


def epoch_order(positions: np.ndarray, size: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (epoch, index in range(size)) of positions in an endless sequence of epochs, each another permutation."""
    positions = np.asarray(positions, np.int64)
    epochs = positions // size
    index = np.empty_like(positions)
    for epoch in np.unique(epochs):
        of_epoch = epochs == epoch
        key = int(scramble(seed, epoch)[0] >> np.uint64(1))
        index[of_epoch] = permute(positions[of_epoch] % size, size, key)
    return epochs, index


def epoch_shift(epochs: np.ndarray, slack: int, seed: int) -> np.ndarray:
    """Returns the offset, 0 to `slack`, of the rows of each epoch: over many epochs every token starts a row."""
    return (scramble(seed, epochs, _SHIFT) % np.uint64(slack + 1)).astype(np.int64)


def random_draws(positions: np.ndarray, size: int, seed: int) -> np.ndarray:
    """Returns a number in range(size) for each position, with replacement."""
    return (scramble(seed, positions, _DRAW) % np.uint64(size)).astype(np.int64)


class Mixture:
    """The source of each position of an endless sequence, and the position within that source.

    Positions come in patterns of one length, which hold each source by its weight. Each pattern is shuffled
    differently. A pattern with more rows of a source than the source has repeats rows before the rest came once.
    """

    def __init__(self, weights: Sequence[float], seed: int):
        self.seed = seed
        total = sum(map(Fraction, weights))
        shares = [Fraction(weight) / total for weight in weights]
        length = min(math.lcm(*(share.denominator for share in shares)), MAX_PATTERN)
        counts = [int(share * length) for share in shares]
        by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - shares[i] * length)
        for i in by_remainder[: length - sum(counts)]:
            counts[i] += 1
        self.counts = np.maximum(counts, 1)  # every named source is read
        self.length = int(self.counts.sum())
        self._ends = np.cumsum(self.counts)

    def locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns (number of the source, position in the source) of each position."""
        patterns, slots = np.divmod(np.asarray(positions, np.int64), self.length)
        for pattern in np.unique(patterns):
            of_pattern = patterns == pattern
            key = int(scramble(self.seed, pattern, _PATTERN)[0] >> np.uint64(1))
            slots[of_pattern] = permute(slots[of_pattern], self.length, key)
        source = np.searchsorted(self._ends, slots, side="right")
        rank = slots - (self._ends - self.counts)[source]
        return source, patterns * self.counts[source] + rank


def _mix(x: np.ndarray) -> np.ndarray:
    """Permutes the 64-bit integers so that every bit depends on every other (the finalizer of SplitMix64)."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
