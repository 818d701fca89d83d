"""One pass over a corpus that writes a sketch of each document: what copies and texts of tests are found by."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from shardformer.data import near_copies, text_cuts, text_files
from shardformer.data.known_texts import LONGEST, KnownTexts
from shardformer.data.recipe import Recipe
from shardformer.data.row_report import RowReport
from shardformer.data.sketch_file import SketchFile
from shardformer.data.source import Progress
from shardformer.data.text_cuts import LINE_BREAKS
from shardformer.data.text_files import FileRange
from shardformer.data.thread_work import run_in_threads
from shardformer.data.word_hashes import Words, hash_words

BATCH = 1 << 22  # bytes whose words are hashed at a time; a longer document is divided
MOST_DOCUMENTS = 1 << 13  # of a batch
REPEATED = max(near_copies.SEQUENCE, LONGEST) - 1  # words of a divided document that both parts have
EXAMPLES = 3  # that a report shows of each reason
BEGINNING = 64  # bytes of a document that an example shows
DIGEST, SIZE, KNOWN, TEXT, SIGNATURE = 0, 1, 2, 3, 3 + BEGINNING // 8  # columns; KNOWN: it has words of a test file


@dataclasses.dataclass
class Sketched:
    """The result of one thread: documents by file, examples of those with known words, and bad rows."""

    number: int
    counts: list[tuple[Path, int]] = dataclasses.field(default_factory=list)
    examples: dict[int, str] = dataclasses.field(default_factory=dict)  # the words, by the number of the document
    rows: RowReport = dataclasses.field(default_factory=RowReport)


def count_columns(is_near: bool) -> int:
    return SIGNATURE + (near_copies.BANDS if is_near else 0)


def sketch_documents(
    recipe: Recipe, sketches: SketchFile, known: KnownTexts | None, progress: Progress
) -> list[Sketched]:
    """Writes the sketches of all documents; returns what was read in the order of the files."""
    tasks = _divide_work(recipe)
    total = sum(part.end - part.start for parts in tasks for part in parts)

    def work(parts: list[FileRange], number: int, advance: Callable[[int], object]) -> Sketched:
        return _Sketcher(recipe, sketches, known, number).read(parts, advance)

    done = sorted(run_in_threads(work, tasks, total, progress), key=lambda each: each.number)
    report = RowReport()
    for each in done:
        report.merge(each.rows)
    if not recipe.skips_bad_rows:
        report.raise_faults()
    return done


def _divide_work(recipe: Recipe) -> list[list[FileRange]]:
    """Returns the parts of all files in their order, small files together, and no file in two tasks."""
    place = {path: number for number, path in enumerate(recipe.files)}
    ranges = sorted((part for item in recipe.items(LINE_BREAKS) for part in item.ranges), key=lambda r: place[r.path])
    tasks: list[list[FileRange]] = []
    size = 0
    for _, group in itertools.groupby(ranges, lambda part: part.path):
        parts = list(group)
        added = sum(part.end - part.start for part in parts)
        if not tasks or size + added > text_cuts.LIMITS.range:
            tasks.append([])
            size = 0
        tasks[-1] += parts
        size += added
    return tasks


class _Cut(NamedTuple):
    """The sketch so far of a document that goes on in the next batch."""

    digest: Any  # of hashlib
    row: np.ndarray
    minima: np.ndarray
    last_words: bytes


class _Sketcher:
    """Reads documents in batches. Only the last document of a batch may go on in the next one."""

    def __init__(self, recipe: Recipe, sketches: SketchFile, known: KnownTexts | None, number: int):
        self._recipe, self._sketches, self._known = recipe, sketches, known
        self._done = Sketched(number)
        self._batch: list[bytes] = []
        self._written = 0  # documents
        self._cut: _Cut | None = None

    def read(self, parts: list[FileRange], advance: Callable[[int], object]) -> Sketched:
        size = 0
        for path, ranges in itertools.groupby(parts, lambda part: part.path):
            before = self._written + len(self._batch)
            for content, ends in _read_documents(self._recipe, ranges, advance, self._done.rows):
                self._batch.append(content)
                size += len(content)
                if size >= BATCH or len(self._batch) >= MOST_DOCUMENTS or not ends:
                    self._write(ends)
                    size = 0
            self._done.counts.append((path, self._written + len(self._batch) - before))
        if self._batch:
            self._write(ends=True)
        return self._done

    def _write(self, ends: bool) -> None:
        """Writes the sketches of the batch; `ends`: its last document is complete."""
        batch, is_near = self._batch, self._sketches.columns > SIGNATURE
        texts = [self._cut.last_words + batch[0], *batch[1:]] if self._cut else batch
        words = hash_words(texts if is_near or self._known else [])
        digests = [hashlib.blake2b(digest_size=8) for _ in batch]
        rows = np.zeros((self._sketches.columns, len(batch)), np.uint64)
        rows[SIZE] = list(map(len, batch))
        rows[KNOWN] = self._find_known(words, texts)
        beginnings = b"".join(content[:BEGINNING].ljust(BEGINNING, b"\0") for content in batch)
        rows[TEXT:SIGNATURE] = np.frombuffer(beginnings, np.uint64).reshape(len(batch), -1).T
        minima = near_copies.find_minima(words, len(batch)) if is_near else np.zeros((len(batch), 0), np.uint32)
        if before := self._cut:
            digests[0] = before.digest
            rows[SIZE : KNOWN + 1, 0] += before.row[SIZE : KNOWN + 1]
            rows[TEXT:SIGNATURE, 0] = before.row[TEXT:SIGNATURE]
            minima[0] = np.minimum(minima[0], before.minima)
        for digest, content in zip(digests, batch, strict=True):
            digest.update(content)
        self._cut = None if ends else _Cut(digests[-1], rows[:, -1], minima[-1], _take_last_words(words, texts))
        count = len(batch) - (not ends)
        rows, minima = rows[:, :count], minima[:count]
        rows[DIGEST] = np.frombuffer(b"".join(digest.digest() for digest in digests[:count]), "<u8")
        if is_near:
            rows[SIGNATURE:] = near_copies.sign(minima, rows[DIGEST]).T
        self._sketches.append((self._done.number, self._written), rows)
        self._written += count
        self._batch = []

    def _find_known(self, words: Words, texts: list[bytes]) -> np.ndarray:
        """Returns which documents of the batch have words of a test file."""
        result = np.zeros(len(texts), bool)
        if not self._known:
            return result
        positions, lengths = self._known.find(words)
        documents, first = np.unique(words.documents[positions], return_index=True)
        result[documents] = True
        if len(documents) and len(self._done.examples) < EXAMPLES:
            joined = b"\n".join(texts)
            for document, position, length in zip(documents[:EXAMPLES], positions[first], lengths[first], strict=False):
                found = joined[words.starts[position] : words.ends[position + length - 1]]
                self._done.examples.setdefault(self._written + int(document), found.decode())
        return result


def _take_last_words(words: Words, texts: list[bytes]) -> bytes:
    """Returns the end of the last document from the first of its last REPEATED words on; at most BATCH bytes."""
    starts = words.starts[words.documents == len(texts) - 1][-REPEATED:]
    before = sum(len(text) + 1 for text in texts[:-1])
    last_words = texts[-1][starts[0] - before :] if len(starts) else b""
    return last_words if len(last_words) <= BATCH else b""


def _read_documents(
    recipe: Recipe, parts: Iterable[FileRange], advance: Callable[[int], object], report: RowReport
) -> Iterator[tuple[bytes, bool]]:
    """Yields documents, long ones in parts of about BATCH bytes, and whether each ends there."""
    for part in parts:
        texts: list[bytes] = []
        size = 0
        for piece in text_files.read_pieces(part, recipe.field, LINE_BREAKS, advance, report):
            texts.append((piece.prompt + piece.text).encode())
            size += len(texts[-1])
            if piece.ends or size >= BATCH:
                yield b"".join(texts), piece.ends
                texts, size = [], 0
        if texts:
            yield b"".join(texts), False
