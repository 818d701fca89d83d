"""Texts to a prepared corpus: tokenised once, in parallel, and whole or not there.

The work is cut into items of a few megabytes. What is done of it survives a kill in a hidden folder beside the target,
which becomes the target by one rename at the end.
"""

import collections
import concurrent.futures
import dataclasses
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardformer.data import text_files
from shardformer.data.text_files import FileRange, Piece
from shardformer.data.token_folder import FORMAT, INDEX, TokenFolder
from shardformer.data.tokens import SPLITS, id_type
from shardformer.data.vocabulary import Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import locked, make_folder, replacing, sync

BATCH = 1 << 20  # characters that are encoded by one call
Progress = Callable[[int, int], object]  # bytes done, of how many


@dataclasses.dataclass(frozen=True)
class Item:
    """What one thread tokenises into one part; `split` is None where each document's hash chooses it."""

    ranges: tuple[FileRange, ...]
    split: str | None = None

    @property
    def bytes(self) -> int:
        return sum(part.end - part.start for part in self.ranges)

    def pieces(self, field: str) -> Iterator[Piece]:
        for part in self.ranges:
            yield from text_files.read_pieces(part, field)

    def batches(self, field: str) -> Iterator[tuple[Path, list[Piece]]]:
        """Pieces of one file that are encoded together."""
        for part in self.ranges:
            for batch in _batched(text_files.read_pieces(part, field)):
                yield part.path, batch


@dataclasses.dataclass(frozen=True)
class Recipe:
    """Which texts, and how they are cut into splits."""

    name: str
    files: tuple[Path, ...]
    field: str = "text"
    share: float = 0.05  # of the documents for validation, and as many for test
    in_order: bool = False  # one long text, whose end is validation and test

    def items(self) -> list[Item]:
        sizes = {path: path.stat().st_size for path in self.files}
        if self.in_order:
            return _cut_in_order(self.files[0], sizes[self.files[0]], self.share)
        items, group = [], []
        for path, size in sizes.items():
            plain = FileRange(path, 0, size, True).is_plain
            ranges = text_files.cut_ranges(path, size) if plain else [FileRange(path, 0, size, True)]
            if len(ranges) > 1:
                items += [Item((part,)) for part in ranges]
                continue
            if group and sum(part.end - part.start for part in group) + size > text_files.RANGE:
                items.append(Item(tuple(group)))
                group = []
            group += ranges
        return items + ([Item(tuple(group))] if group else [])

    def identity(self) -> str:
        """Of the files as they are now: another one when any of them changes."""
        stats = [(str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in self.files]
        options = [self.field, self.share, self.in_order]
        return hashlib.sha256(json.dumps([FORMAT, stats, options]).encode()).hexdigest()


def _cut_in_order(path: Path, size: int, share: float) -> list[Item]:
    """The text's last shares are validation and test."""
    with open(path, "rb") as file:
        borders = [text_files.find_break(file, int(size * (1 - n * share)), size) if share else size for n in (2, 1)]
    items, start = [], 0
    for split, end in zip(SPLITS, (*borders, size), strict=True):
        items += [Item((part,), split) for part in text_files.cut_ranges(path, end, start) if part.start < part.end]
        start = end
    return items


def prepare(recipe: Recipe, vocabulary: Vocabulary, out: Path, progress: Progress = lambda *_: None) -> TokenFolder:
    """Tokenises all of it into `out`, or goes on where it was interrupted."""
    identify = lambda: hashlib.sha256((recipe.identity() + vocabulary.sha256).encode()).hexdigest()
    identity = identify()
    hidden = out.with_name(f".{out.name}.preparing-{identity[:12]}")
    make_folder(out.parent)
    with locked(hidden.with_suffix(".lock")):
        if out.exists():  # another process prepared it while this one waited
            return TokenFolder.open(out)
        every = set(out.parent.glob(f".{glob.escape(out.name)}.preparing-*/"))
        for stale in every - {hidden}:  # of other texts or options
            shutil.rmtree(stale)
        make_folder(hidden)
        items = recipe.items()
        done, total = 0, sum(item.bytes for item in items)
        progress(done, total)
        with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
            tasks = {
                pool.submit(_write_part, item, number, recipe, vocabulary, hidden): item
                for number, item in enumerate(items)
            }
            try:
                for task in concurrent.futures.as_completed(tasks):
                    task.result()
                    done += tasks[task].bytes
                    progress(done, total)
            except BaseException as error:
                pool.shutdown(cancel_futures=True)
                if isinstance(error, OSError):  # of what is written: a source that cannot be read is named before
                    raise RunError(
                        f"cannot write {hidden}: {error.strerror or error}; the same command goes on from what is there"
                    ) from None
                raise
        if identify() != identity:
            shutil.rmtree(hidden)
            raise UsageError(f"{recipe.name} has changed while it was prepared; start again")
        _write_index(recipe, vocabulary, hidden, len(items))
        os.rename(hidden, out)
        sync(out.parent)
    return TokenFolder.open(out)


class _PartWriter:
    """The tokens of one split of one item, and where its documents end."""

    def __init__(self, path: Path, dtype: np.dtype):
        self._file, self._dtype = open(path, "wb"), dtype  # noqa: SIM115 (closed by `close`)
        self._digest = hashlib.sha256()
        self.tokens, self.bytes, self.ends, self.prompts = 0, 0, [], []

    def write(self, ids: np.ndarray) -> None:
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)

    def close(self) -> dict:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self._digest.hexdigest(), "ends": self.ends,
                "prompts": self.prompts}  # fmt: skip


def _write_part(item: Item, number: int, recipe: Recipe, vocabulary: Vocabulary, folder: Path) -> None:
    """The files of one item; its .json, written last, says that they are complete."""
    record = folder / f"part_{number:05d}.json"
    if record.exists():
        return
    dtype = id_type(len(vocabulary))
    writers = {split: _PartWriter(folder / f"part_{number:05d}.{split}.bin", dtype) for split in SPLITS}
    split, length = item.split, 0
    separator = [] if recipe.in_order or vocabulary.end_of_text is None else [vocabulary.end_of_text]
    begins, by_source = True, {}
    for source, batch in item.batches(recipe.field):
        prompts = iter(vocabulary.encode_all([piece.prompt for piece in batch if piece.prompt], recipe.name))
        for piece, ids in zip(batch, vocabulary.encode_all([p.text for p in batch], recipe.name), strict=True):
            if begins:
                split = item.split or _choose_split(piece.prompt + piece.text, item, recipe.share)
            writer, prompt = writers[split], next(prompts) if piece.prompt else np.zeros(0, np.int32)
            length = len(prompt) if begins else length
            for part in (prompt, ids):
                writer.write(part)
                by_source[str(source)] = by_source.get(str(source), 0) + len(part)
            writer.bytes += len((piece.prompt + piece.text).encode("utf-8", "surrogatepass"))
            if piece.ends:
                writer.write(np.array(separator, np.int32))
                writer.ends.append(writer.tokens)
                writer.prompts.append(length)
            begins = piece.ends
    found = {split: writer.close() for split, writer in writers.items()} | {"by_source": by_source}
    with replacing(record) as temporary:
        temporary.write_text(json.dumps(found))


def _choose_split(text: str, item: Item, share: float) -> str:
    """By the hash of how a document begins; a file that is cut into several items is a train document."""
    if len(item.ranges) == 1 and not (item.ranges[0].start == 0 and item.ranges[0].ends):
        return "train"
    digest = hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()
    chance = int.from_bytes(digest[:8], "big") / 2**64
    return "validation" if chance < share else "test" if chance < 2 * share else "train"


def _batched(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    batch, size = [], 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text) + len(piece.prompt)
        if size >= BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _write_index(recipe: Recipe, vocabulary: Vocabulary, folder: Path, items: int) -> None:
    """Joins the parts' records; the index comes last."""
    parts = [json.loads((folder / f"part_{number:05d}.json").read_text()) for number in range(items)]
    splits, fingerprint = {}, hashlib.sha256(vocabulary.sha256.encode())
    any_prompts = any(prompt for part in parts for split in SPLITS for prompt in part[split]["prompts"])
    by_source = collections.Counter()
    for part in parts:
        by_source.update(part["by_source"])
    for split in SPLITS:
        ends, prompts, tokens, files = [], [], 0, []
        for number, part in enumerate(parts):
            found, file = part[split], f"part_{number:05d}.{split}.bin"
            if not found["tokens"]:
                (folder / file).unlink(missing_ok=True)  # a start that was killed here may have removed it
                continue
            ends.append(np.array(found["ends"], np.int64) + tokens)
            prompts += found["prompts"]
            tokens += found["tokens"]
            files.append({"file": file, "tokens": found["tokens"], "sha256": found["sha256"]})
            fingerprint.update(f"{split} {found['sha256']} ".encode())
        ends = np.concatenate(ends) if ends else np.zeros(0, np.int64)
        fingerprint.update(ends.tobytes())
        np.save(folder / f"{split}.ends.npy", ends)
        if any_prompts:
            np.save(folder / f"{split}.prompts.npy", np.array(prompts, np.int32))
        size = sum(part[split]["bytes"] for part in parts)
        splits[split] = {"tokens": tokens, "bytes": size, "documents": len(ends), "parts": files}
    if not any(found["bytes"] for found in splits.values()):
        shutil.rmtree(folder)
        raise UsageError(f"{recipe.name} has no text; name files that hold some")
    for number in range(items):
        (folder / f"part_{number:05d}.json").unlink()
    index = {
        "format": FORMAT,
        "name": recipe.name,
        "tokenizer": vocabulary.name,
        "vocabulary_size": len(vocabulary),
        "validation_share": recipe.share,
        "has_documents": not recipe.in_order,
        "prompts": any_prompts,
        "fingerprint": fingerprint.hexdigest(),
        "splits": splits,
        "sources": [
            {"path": str(path), "bytes": path.stat().st_size, "tokens": by_source[str(path)]} for path in recipe.files
        ],
    }
    for name, text in vocabulary.documents(source=recipe.name, fingerprint=index["fingerprint"]).items():
        (folder / name).write_text(text, "utf-8")
    (folder / "README.md").write_text(describe(index), "utf-8", errors="replace")
    for path in folder.iterdir():
        sync(path)
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n")


def describe(index: dict) -> str:
    """What a prepared folder is, for whoever finds it."""
    rows = "\n".join(
        f"| {split} | {found['tokens']:,} | {found['documents']:,} | {found['bytes']:,} |"
        for split, found in index["splits"].items()
    )
    return f"""# {index["name"]}

Token ids for `python -m shardformer train PRESET data=THIS_FOLDER`, made by `python -m shardformer data prepare`.
`index.json` lists the parts: little-endian uint{16 if index["vocabulary_size"] <= 1 << 16 else 32} ids, to be joined in
their order. `SPLIT.ends.npy` holds where each document ends. The tokenizer is `{index["tokenizer"]}`, of
{index["vocabulary_size"]:,} entries (`vocabulary.json`).

| split | tokens | documents | bytes of text |
|---|---|---|---|
{rows}
"""
