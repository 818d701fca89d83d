"""Checksums detect every small change, and a restore reads only the blocks that it needs."""

import itertools
import os
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import Damaged, array_files, checksums, manifest
from tests.surroundings import before_call, change_blocks


@pytest.fixture
def small_blocks(monkeypatch):
    change_blocks(monkeypatch, 64)


@pytest.mark.parametrize("size", [0, 1, 63, 2**14, 2**14 + 8, 3 * 2**14 + 5])
def test_every_changed_byte_changes_the_checksum(size):
    data = np.random.default_rng(0).integers(0, 256, size, np.uint8)
    sound = checksums.compute_checksum(data)
    for at in {0, size // 2, size - 1, min(2**14, size - 1)} if size else ():
        for bit in range(8):
            data[at] ^= 1 << bit
            assert checksums.compute_checksum(data) != sound
            data[at] ^= 1 << bit
    assert checksums.compute_checksum(data) == sound


def test_lost_moved_and_stale_stretches_change_the_checksum():
    data = np.random.default_rng(0).integers(0, 256, 2**17, np.uint8)
    sound = checksums.compute_checksum(data)
    for size in (512, 4096, 2**14, 2**16):
        for start in range(0, 2**17 - size, size):
            lost, moved = data.copy(), data.copy()
            lost[start : start + size] = 0
            assert checksums.compute_checksum(lost) != sound
            moved[start : start + size] = data[(start + size) % 2**17 :][:size]
            assert checksums.compute_checksum(moved) != sound


@pytest.mark.parametrize("far", [1, 2, 1023, 1024, 1025, 2048, 100 * 1024, 500 * 1024 + 7])
def test_two_changes_that_cancel_in_one_sum_are_detected(far):
    """As two flips of the highest bit do, and any exchange."""
    data = np.random.default_rng(0).integers(0, 256, checksums.BLOCK, np.uint8)
    words, sound = data.view("<u8"), checksums.compute_checksum(data)
    for at in (0, 1000, 5000):
        pair = [at, at + far]
        before = words[pair]
        for after in (before ^ np.uint64(1 << 63), before[::-1], before + np.array([2**40, -(2**40)]).view(np.uint64)):
            words[pair] = after
            assert checksums.compute_checksum(data) != sound
        words[pair] = before
    assert checksums.compute_checksum(data) == sound


def test_pages_that_change_places_change_the_checksum():
    data = np.random.default_rng(0).integers(0, 256, checksums.BLOCK, np.uint8)
    pages, sound = data.reshape(-1, 4096), checksums.compute_checksum(data)
    for one, other in ((0, 1), (0, 2), (3, 5), (0, 4), (1, 201), (0, 255), (127, 253)):
        pages[[one, other]] = pages[[other, one]]
        assert checksums.compute_checksum(data) != sound
        pages[[one, other]] = pages[[other, one]]
    assert checksums.compute_checksum(data) == sound


@pytest.mark.parametrize("shape", [(7, 5, 11), (40, 16), (2, 300), (1000,), ()])
@pytest.mark.parametrize("itemsize", [1, 4])
def test_touched_blocks_hold_the_box_and_nothing_is_missing(small_blocks, shape, itemsize):
    of_each = (np.arange(np.prod(shape, dtype=int)) * itemsize // 64).reshape(shape)
    ends = ((np.arange(np.prod(shape, dtype=int)) * itemsize + itemsize - 1) // 64).reshape(shape)
    ranges = [[(a, b) for a, b in itertools.combinations(sorted({0, 1, n // 3, n // 2, n}), 2)] for n in shape]
    for box in itertools.product(*ranges):
        within = tuple(slice(*edges) for edges in box)
        needed = {*np.unique(of_each[within]).tolist(), *np.unique(ends[within]).tolist()}
        got = checksums.find_blocks(shape, itemsize, box)
        assert needed <= set(got)
        assert len(got) <= max(needed) - min(needed) + 1


def test_blocks_of_a_large_box_are_found_without_its_elements():
    """Neighbouring elements are joined into spans: one number for each would take 8 MiB here."""
    tracemalloc.start()
    assert checksums.find_blocks((2**10, 2**10), 4, ((0, 2**10), (0, 2**10))) == [0]
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**16


def test_rows_of_a_large_array_take_their_own_blocks(small_blocks):
    assert checksums.find_blocks((100, 32), 4, ((10, 20), (0, 32))) == list(range(20, 40))
    assert checksums.find_blocks((10, 100, 32), 1, ((0, 10), (0, 2), (0, 32))) == [50 * layer for layer in range(10)]


def test_damage_elsewhere_does_not_matter_and_is_not_read(small_blocks, tmp_path, monkeypatch):
    """As for a process that needs other rows than those."""
    table = np.arange(100 * 32, dtype=np.float32).reshape(100, 32)
    folder = checkpoint.save(tmp_path, 1, {"table": jnp.asarray(table)}, {})
    path = folder / "arrays.npy"
    raw = bytearray(path.read_bytes())
    raw[-32 * 4 * 10] ^= 1  # in row 90
    path.write_bytes(raw)
    stored = manifest.read_manifest(folder)
    read = []
    before_call(monkeypatch, os, "preadv", lambda file, views, at: read.append(views[0].nbytes))
    with array_files.Reader(folder, stored) as reader:
        rows = ((10, 20), (0, 32))
        np.testing.assert_array_equal(reader.read_slices("table", [rows])[rows], table[10:20])
        assert sum(read) == 128 + table[10:20].nbytes  # with the header
        with pytest.raises(Damaged, match=r"leaf 'table', bytes \d+ to \d+, has the checksum"):
            reader.read_slices("table", [((85, 95), (0, 32))])
