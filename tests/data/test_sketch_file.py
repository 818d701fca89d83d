"""Rows of documents on the disk: numbered by their places, whatever order threads append them in."""

import numpy as np
import pytest

from shardformer.data.sketch_file import SketchFile

BLOCKS = {(0, 0): 3, (0, 3): 1, (1, 0): 0, (2, 0): 4}


def write(folder, order) -> tuple[SketchFile, np.ndarray]:
    """Returns a file of 2 columns, and all of its rows in the order of the documents."""
    blocks = {place: np.arange(2 * n, dtype=np.uint64).reshape(2, n) + 100 * i for i, (place, n) in
              enumerate(BLOCKS.items())}  # fmt: skip
    file = SketchFile(folder, 2)
    for place in order:
        file.append(place, blocks[place])
    assert file.sort() == 8
    return file, np.concatenate(list(blocks.values()), axis=1)


@pytest.mark.parametrize("reverse", [False, True])
def test_documents_are_numbered_by_their_places(tmp_path, reverse):
    file, expected = write(tmp_path, sorted(BLOCKS, reverse=reverse))
    for column in range(2):
        blocks = list(file.read_blocks(column))
        assert [start for start, _ in blocks] == [0, 3, 4, 4]
        np.testing.assert_array_equal(np.concatenate([values for _, values in blocks]), expected[column])
    documents = np.array([7, 0, 3, 4, 3])
    np.testing.assert_array_equal(file.gather(np.array([1, 0]), documents), expected[::-1, documents].T)


def test_file_has_no_name(tmp_path):
    file, _ = write(tmp_path, BLOCKS)
    assert not list(tmp_path.iterdir())
    file.close()


def test_file_without_documents(tmp_path):
    file = SketchFile(tmp_path, 2)
    assert file.sort() == 0
    assert list(file.read_blocks(0)) == []
