"""Near-copies of documents: MinHash signatures, and the search for documents whose signatures agree.

A signature estimates the Jaccard similarity of two documents' sets of SEQUENCE words. One hash of each sequence serves
all BINS values: its upper bits choose a bin, and the least hash of a bin is its value (one-permutation hashing). An
empty bin borrows the value of another one, in an order that is the same for all documents.
"""

from collections.abc import Iterator

import numpy as np

from shardformer.data.order import scramble
from shardformer.data.sketch_file import SketchFile
from shardformer.data.source import Progress
from shardformer.data.word_hashes import Words, hash_sequences

SEQUENCE = 5  # words
BINS = 128  # values of a signature
BIN_BITS = 7
BANDS = 32  # of 4 values of 16 bits, so that a band is one integer of 64 bits
SIMILAR = 0.5  # of the values of two near-copies agree
EMPTY = np.uint32(0xFFFFFFFF)
STEP = 37  # odd, so that its multiples reach every bin
MOST_KEYS = 1 << 23  # that are sorted at a time
MOST_PAIRS = 1 << 16  # that are compared at a time


def find_minima(words: Words, documents: int) -> np.ndarray:
    """Returns the least hash in each bin: uint32 [documents, BINS]. Minima of the parts of a document are its own."""
    hashes, is_inside = hash_sequences(words, SEQUENCE)
    bins = (hashes >> np.uint64(64 - BIN_BITS)).astype(np.int64)
    values = np.where(is_inside, hashes.astype(np.uint32), EMPTY)
    minima = np.full(documents * BINS, EMPTY, np.uint32)
    np.minimum.at(minima, words.documents[: len(hashes)].astype(np.int64) * BINS + bins, values)
    return minima.reshape(documents, BINS)


def sign(minima: np.ndarray, digests: np.ndarray) -> np.ndarray:
    """Returns the signatures, uint64 [documents, BANDS]; of a document without a sequence, its digest decides."""
    values = minima.reshape(-1).copy()
    is_short = (minima == EMPTY).all(axis=1)
    missing = np.flatnonzero(values == EMPTY)
    missing = missing[~is_short[missing // BINS]]
    for attempt in range(1, BINS):
        if not len(missing):
            break
        values[missing] = minima.reshape(-1)[missing ^ (STEP * attempt % BINS)]  # of another bin of the document
        missing = missing[values[missing] == EMPTY]
    signatures = values.astype("<u2").view("<u8").reshape(-1, BANDS).astype(np.uint64)
    signatures[is_short] = scramble(digests[is_short, None], np.arange(BANDS)[None])
    return signatures


def find_equal(sketches: SketchFile, column: int, is_left_out: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs (later documents, earlier ones) that agree in a column.

    Each later one is paired with the first and with the previous document that it agrees with. The documents are
    divided by their values, so that about MOST_KEYS of them are in memory at a time.
    """
    parts = np.uint64(-(-int(np.count_nonzero(~is_left_out)) // MOST_KEYS) or 1)
    for part in range(int(parts)):
        keys, documents = [np.zeros(0, np.uint64)], [np.zeros(0, np.int64)]
        for start, values in sketches.read_blocks(column):
            chosen = np.flatnonzero((values % parts == part) & ~is_left_out[start : start + len(values)])
            keys.append(values[chosen])
            documents.append(chosen + start)
        yield from _pair(np.concatenate(keys), np.concatenate(documents))


def _pair(keys: np.ndarray, documents: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    order = np.argsort(keys, kind="stable")  # documents stay in their order among equal keys
    keys, documents = keys[order], documents[order]
    begins = np.concatenate([[True], keys[1:] != keys[:-1]])[: len(keys)]
    later = np.flatnonzero(~begins)
    first = np.maximum.accumulate(np.where(begins, np.arange(len(keys)), 0))[later]
    yield documents[later], documents[first]
    third = first < later - 1
    yield documents[later[third]], documents[later[third] - 1]


def find_near(
    sketches: SketchFile, column: int, is_left_out: np.ndarray, progress: Progress
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yields pairs (later documents, earlier ones) that are similar, by the signatures from a column on.

    The progress counts the bytes of signatures.
    """
    columns = np.arange(column, column + BANDS)
    is_found = np.zeros_like(is_left_out)
    size = columns.itemsize * len(is_left_out)  # of a band
    for done, band in enumerate(columns.tolist()):
        progress(done * size, BANDS * size)
        for pairs in find_equal(sketches, band, is_left_out):
            for start in range(0, len(pairs[0]), MOST_PAIRS):
                later, earlier = (documents[start : start + MOST_PAIRS] for documents in pairs)
                later, earlier = later[~is_found[later]], earlier[~is_found[later]]
                differ = sketches.gather(columns, later) ^ sketches.gather(columns, earlier)
                is_near = (differ.view(np.uint16) == 0).mean(axis=1) >= SIMILAR
                is_found[later[is_near]] = True
                yield later[is_near], earlier[is_near]
    progress(BANDS * size, BANDS * size)
