"""Documents that a corpus leaves out: copies, near-copies, and those that have words of test files.

The corpus is read twice: here, and by `prepare`, which leaves out what was found. A document stays if no earlier one
resembles it. The result depends on the documents and their order only.
"""

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from shardformer.data import near_copies
from shardformer.data.digests import Stamp, digest_files
from shardformer.data.document_sketches import (
    DIGEST,
    EXAMPLES,
    KNOWN,
    SIGNATURE,
    SIZE,
    TEXT,
    Sketched,
    count_columns,
    sketch_documents,
)
from shardformer.data.known_texts import KnownTexts, list_known
from shardformer.data.recipe import Recipe
from shardformer.data.sketch_file import SketchFile
from shardformer.data.source import Progress
from shardformer.data.text_files import FileRange, Piece
from shardformer.errors import RunError, UsageError
from shardformer.files import make_folder

RULES = 3  # of what resembles; another number for each change, as a killed command would mix two
TESTED, EQUAL, NEAR = "words of a test file", "equal to an earlier document", "near-copies of an earlier document"


@dataclasses.dataclass(frozen=True)
class Removal:
    """The documents that a corpus leaves out, by their numbers in each file, and a report of them for index.json."""

    identity: str
    stamps: list[Stamp]  # of the files that were read
    numbers: dict[Path, np.ndarray]
    report: dict

    def retain(self, part: FileRange, pieces: Iterator[Piece]) -> Iterator[Piece]:
        """Yields the pieces of documents that stay."""
        removed = iter(self.numbers.get(part.path, np.zeros(0, np.int64)).tolist())
        number, following = 0, next(removed, None)
        for piece in pieces:
            if number != following:
                yield piece
            if piece.ends:
                following = next(removed, None) if number == following else following
                number += 1


def remove_documents(
    recipe: Recipe, dedup: str, against: str, folder: Path, progress: Progress, of_pairs: Progress
) -> Recipe:
    """Returns the recipe without copies and texts of tests; `folder` is on a disk with room for the sketches.

    `progress` counts the documents' bytes that are read, `of_pairs` those of the signatures that are compared.
    """
    if recipe.has_masks or not recipe.files:
        kind = "conversations or pairs" if recipe.has_masks else "token ids"
        raise UsageError(f"dedup and against compare texts, and {recipe.name} holds {kind}; leave both out")
    if recipe.in_order:
        raise UsageError(
            f"dedup and against compare documents, and {recipe.name} is one text; give .jsonl records or several files"
        )
    files = list_known(against) if against else []
    identity = hashlib.sha256(json.dumps([RULES, dedup, digest_files(files)]).encode()).hexdigest()
    known, stamps = KnownTexts(files) if files else None, recipe.stamps()
    try:
        make_folder(folder)
        sketches = SketchFile(folder, count_columns(dedup == "near"))
        try:
            found = _Found(sketches, sketch_documents(recipe, sketches, known, progress))
            if dedup != "none":
                found.remove(EQUAL, near_copies.find_equal(sketches, DIGEST, found.is_removed.copy()))
            if dedup == "near":
                found.remove(NEAR, near_copies.find_near(sketches, SIGNATURE, found.is_removed.copy(), of_pairs))
            found.check_rest(recipe.name)
            removal = Removal(identity, stamps, found.number_by_file(), found.report())
        finally:
            sketches.close()
    except OSError as error:
        raise RunError(f"cannot write sketches of documents in {folder}: {error.strerror or error}") from None
    return dataclasses.replace(recipe, removal=removal)


class _Found:
    """The documents that are removed so far, with reasons and examples."""

    def __init__(self, sketches: SketchFile, sketched: list[Sketched]):
        self._sketches, self._files = sketches, [each for done in sketched for each in done.counts]
        self.is_removed = np.zeros(sketches.sort(), bool)
        self._starts = np.cumsum([0, *(count for _, count in self._files)])
        self._reasons: dict[str, dict] = {}
        for start, values in sketches.read_blocks(KNOWN):
            self.is_removed[start : start + len(values)] = values > 0
        if self.is_removed.any():
            firsts = np.cumsum([0, *(sum(count for _, count in done.counts) for done in sketched)]).tolist()
            examples = sorted((first + number, words) for first, done in zip(firsts, sketched, strict=False)
                              for number, words in done.examples.items())  # fmt: skip
            self._note(TESTED, self.is_removed, [f"{self._name(n)} has {words!r}" for n, words in examples[:EXAMPLES]])

    def remove(self, reason: str, pairs: Iterator[tuple[np.ndarray, np.ndarray]]) -> None:
        """Removes the first documents of pairs, each with the other as its reason."""
        removed, first = np.zeros_like(self.is_removed), dict[int, int]()
        for later, earlier in pairs:
            removed[later] = True
            smallest = np.argsort(later, kind="stable")[:EXAMPLES]
            first = dict(zip(later[smallest].tolist(), earlier[smallest].tolist(), strict=True)) | first
            first = dict(sorted(first.items())[:EXAMPLES])
        if removed.any():
            self._note(reason, removed, [f"{self._name(n)} is like {self._name(first[n])}" for n in first])
        self.is_removed |= removed

    def check_rest(self, name: str) -> None:
        """Raises UsageError if no document stays."""
        if len(self.is_removed) and self.is_removed.all():
            counts = ", ".join(f"{each['documents']:,} {reason}" for reason, each in self._reasons.items())
            example = next(iter(self._reasons.values()))["examples"][0]
            raise UsageError(
                f"all {len(self.is_removed):,} documents of {name} are left out: {counts}; for example {example}; "
                "name other documents, or other files with against="
            )

    def number_by_file(self) -> dict[Path, np.ndarray]:
        """Returns the numbers of the removed documents of each file, counted from 0."""
        result = {}
        for (path, count), start in zip(self._files, self._starts.tolist(), strict=False):
            if self.is_removed[start : start + count].any():
                result[path] = np.flatnonzero(self.is_removed[start : start + count])
        return result

    def report(self) -> dict:
        """Returns what index.json has of the removal."""
        every = np.ones_like(self.is_removed)
        return {"documents": len(every), "bytes": self._count_bytes(every), "reasons": self._reasons}

    def _note(self, reason: str, removed: np.ndarray, examples: list[str]) -> None:
        count = int(np.count_nonzero(removed))
        self._reasons[reason] = {"documents": count, "bytes": self._count_bytes(removed), "examples": examples}

    def _count_bytes(self, chosen: np.ndarray) -> int:
        return sum(int(sizes[chosen[start : start + len(sizes)]].sum()) for start, sizes in
                   self._sketches.read_blocks(SIZE))  # fmt: skip

    def _name(self, document: int) -> str:
        """Returns the file, the number there and the beginning of a document, as an example shows them."""
        file = int(np.searchsorted(self._starts, document, side="right")) - 1
        content = self._sketches.gather(np.arange(TEXT, SIGNATURE), np.array([document])).tobytes().rstrip(b"\0")
        text = content.decode("utf-8", "ignore")
        return f"{self._files[file][0]} document {document - int(self._starts[file]) + 1} ({text!r})"
