"""Sequences of words of test files, and the documents that contain one."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardformer.data import text_files
from shardformer.data.listing import list_files
from shardformer.data.text_files import FileRange, Piece
from shardformer.data.word_hashes import Words, hash_sequences, hash_words
from shardformer.errors import UsageError
from shardformer.storage import local_path

LONGEST, SHORTEST = 13, 8  # words; a shorter text of a test is too common to be found by
BATCH = 1 << 22  # bytes whose words are hashed at a time
TABLE_BITS = range(16, 27)  # of a table that most other sequences miss
EXPECTED = "against takes text files, records, folders or globs"


def list_known(names: str) -> list[Path]:
    """Returns the files of `against=`: paths, folders and globs, separated by commas."""
    if not all(name.strip() for name in names.split(",")):
        raise UsageError(f"against={names} has an empty name between its commas; {EXPECTED}")
    return [file for name in names.split(",") for file in list_files(name, local_path(name), None, EXPECTED, "against")]


class KnownTexts:
    """The hashed sequences of all texts of some files: of LONGEST words, or of a shorter text all of its words."""

    def __init__(self, files: list[Path]):
        batches = [_hash_batch(batch) for batch in _batch(text for file in files for text in _read_texts(file))]
        lengths = sorted({length for batch in batches for length in batch})
        by_length = {n: np.unique(np.concatenate([batch[n] for batch in batches if n in batch])) for n in lengths}
        if not by_length:
            raise UsageError(f"against={','.join(map(str, files))} has no text of {SHORTEST} words; name test files")
        self._tables = {length: (hashes, *_make_table(hashes)) for length, hashes in by_length.items()}

    def find(self, words: Words) -> tuple[np.ndarray, np.ndarray]:
        """Returns the positions of known sequences among the words, ascending, and how many words each has."""
        positions, lengths = [], []
        for length, (known, table, shift) in self._tables.items():
            hashes, is_inside = hash_sequences(words, length)
            likely = np.flatnonzero(table[hashes >> shift] & is_inside)
            nearest = np.minimum(np.searchsorted(known, hashes[likely]), len(known) - 1)
            positions.append(likely[known[nearest] == hashes[likely]])
            lengths.append(np.full(len(positions[-1]), length))
        order = np.argsort(np.concatenate(positions), kind="stable")
        return np.concatenate(positions)[order], np.concatenate(lengths)[order]


def _make_table(hashes: np.ndarray) -> tuple[np.ndarray, np.uint64]:
    """Returns which upper bits a hash has, and the shift to them: faster than a search, and seldom wrong."""
    bits = min(max(len(hashes).bit_length() + 4, TABLE_BITS.start), TABLE_BITS.stop)
    shift = np.uint64(64 - bits)
    table = np.zeros(1 << bits, bool)
    table[hashes >> shift] = True
    return table, shift


def _hash_batch(texts: list[bytes]) -> dict[int, np.ndarray]:
    """Returns the hashed sequences of some texts by their number of words."""
    words = hash_words(texts)
    counts = np.minimum(np.bincount(words.documents, minlength=len(texts)), LONGEST)
    result = {}
    for length in range(SHORTEST, LONGEST + 1):
        hashes, is_inside = hash_sequences(words, length)
        chosen = is_inside & (counts[words.documents[: len(hashes)]] == length)
        if chosen.any():
            result[length] = np.unique(hashes[chosen])
    return result


def _batch(texts: Iterator[bytes]) -> Iterator[list[bytes]]:
    batch: list[bytes] = []
    size = 0
    for text in texts:
        batch.append(text)
        size += len(text) + 1
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _read_texts(path: Path) -> Iterator[bytes]:
    """Yields every text of a file: of records, that of each field; of a plain file, all of it and each of its lines."""
    if text_files.contains_records(path):
        for pieces in text_files.read_rows(path, lambda record, _: tuple(map(Piece, _find_strings(record)))):
            yield from (piece.text.encode() for piece in pieces)
        return
    file = FileRange(path, 0, path.stat().st_size, True)
    for piece in text_files.read_pieces(file, "text"):
        yield piece.text.encode()
        yield from piece.text.encode().splitlines()


def _find_strings(value) -> Iterator[str]:
    """Yields all texts in a value of JSON."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from _find_strings(each)
