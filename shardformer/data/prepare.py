"""Documents and token files to a prepared corpus: read once, in parallel; the folder is complete or does not exist.

The work is divided into items of a few megabytes. Items that are done survive a kill in a hidden folder next to the
target. One rename at the end makes that folder the target.
"""

import collections
import glob
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from shardformer.data.chat.chat_files import mask_tokens, read_conversations
from shardformer.data.chat.letters import remove_guards
from shardformer.data.chat.preferences import encode_side, read_pairs
from shardformer.data.recipe import Item, Recipe, TokenItem
from shardformer.data.row_report import RowReport
from shardformer.data.source import Progress
from shardformer.data.text_cuts import Breaks
from shardformer.data.text_files import Piece
from shardformer.data.thread_work import SECONDS_BETWEEN_REPORTS, run_in_threads
from shardformer.data.token_folder import (
    FORMAT,
    INDEX,
    SplitContent,
    TokenFolder,
    compute_fingerprint,
    digests_of,
    mask_path,
)
from shardformer.data.tokens import SPLITS, describe_largest_id, id_type, open_token_file, read_blocks
from shardformer.data.vocabulary import Vocabulary
from shardformer.errors import RunError, UsageError
from shardformer.files import check_no_link, locked, make_folder, remove_temporary, replacing, sync

BATCH = 1 << 20  # characters that are encoded by one call


def prepare(
    recipe: Recipe,
    vocabulary: Vocabulary,
    out: Path,
    progress: Progress = lambda *_: None,
    seconds_between_reports: float = SECONDS_BETWEEN_REPORTS,
) -> TokenFolder:
    """Tokenises the documents of a recipe into `out`, or continues after an interruption."""
    stamps = recipe.removal.stamps if recipe.removal else recipe.stamps()
    identity = recipe.identify_with(vocabulary)
    hidden = out.with_name(f".{out.name}.preparing-{identity[:12]}")
    make_folder(out.parent)
    with locked(out.with_name(f".{out.name}.preparing.lock")):
        if out.exists():  # another process prepared it while this one waited
            return _open_equal(out, identity)
        every = set(out.parent.glob(f".{glob.escape(out.name)}.preparing-*/"))
        for folder in {*every, hidden}:
            check_no_link(folder)
        for stale in every - {hidden}:  # of other documents or options
            shutil.rmtree(stale)
        make_folder(hidden)
        remove_temporary(hidden)
        items: list[Item | TokenItem] = [*recipe.items(vocabulary.breaks), *recipe.token_items()]
        _write_parts(items, recipe, vocabulary, hidden, progress, seconds_between_reports)
        if recipe.stamps() != stamps:
            shutil.rmtree(hidden)
            raise UsageError(f"{recipe.name} has changed while it was prepared; start again")
        _write_index(recipe, vocabulary, hidden, len(items), identity)
        os.rename(hidden, out)
        sync(out.parent)
    return TokenFolder.open(out)


def _open_equal(out: Path, identity: str) -> TokenFolder:
    """Opens a folder that another process has written, if it was created from the same recipe."""
    result = TokenFolder.open(out)
    if result.index.get("identity") != identity:
        raise UsageError(
            f"out={out} was prepared by another process meanwhile, from other texts, with other options or another "
            "tokenizer; name another folder"
        )
    return result


def _write_parts(
    items: list[Item | TokenItem],
    recipe: Recipe,
    vocabulary: Vocabulary,
    hidden: Path,
    progress: Progress,
    seconds_between_reports: float,
) -> None:
    """Writes the parts that are missing, in as many threads as there are cores; raises for all bad rows at once."""
    report, total = RowReport(), sum(item.bytes for item in items)

    def work(item: Item | TokenItem, number: int, advance: Callable[[int], object]) -> RowReport:
        return _write_part(item, number, recipe, vocabulary, hidden, advance)

    try:
        for result in run_in_threads(work, items, total, progress, seconds_between_reports):
            report.merge(result)
    except OSError as error:  # of what is written: a source that cannot be read is named before
        raise RunError(f"cannot write {hidden}: {error.strerror or error}; the same command goes on") from None
    if not recipe.skips_bad_rows:
        report.raise_faults()


class _PartWriter:
    """The tokens of one split of one item, the ends of its documents and, for conversations, the loss mask."""

    def __init__(self, path: Path, dtype: np.dtype, mask: Path | None = None):
        self._file, self._dtype = open(path, "wb"), dtype  # noqa: SIM115 (closed by `close`)
        self._digest = hashlib.sha256()
        self._mask = _PartWriter(mask, np.dtype(np.uint8)) if mask else None
        self.tokens = self.bytes = 0
        self.ends: list[int] = []
        self.prompts: list[int] = []

    def write(self, ids: np.ndarray) -> None:
        content = ids.astype(self._dtype).tobytes()
        self._file.write(content)
        self._digest.update(content)
        self.tokens += len(ids)

    def write_conversation(self, ids: np.ndarray, trained: np.ndarray) -> None:
        """Writes a document with its mask: 1 for every id with a loss."""
        assert self._mask
        self.write(ids)
        self._mask.write(trained)
        self.end_document([], 0)

    def end_document(self, separator: list[int], prompt_length: int) -> None:
        self.write(np.array(separator, np.int32))
        self.ends.append(self.tokens)
        self.prompts.append(prompt_length)

    def close(self) -> dict:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        mask = {"mask_sha256": self._mask.close()["sha256"]} if self._mask else {}
        return {"tokens": self.tokens, "bytes": self.bytes, "sha256": self._digest.hexdigest(), "ends": self.ends,
                "prompts": self.prompts} | mask  # fmt: skip


def _write_part(
    item: Item | TokenItem,
    number: int,
    recipe: Recipe,
    vocabulary: Vocabulary,
    folder: Path,
    advance: Callable[[int], object] = lambda _: None,
) -> RowReport:
    """Writes the files of one item; its .json, written last, marks them as complete, unless a bad row stops."""
    record, report = folder / f"part_{number:05d}.json", RowReport()
    if record.exists():
        advance(item.bytes)
        return report
    dtype = id_type(len(vocabulary))
    paths = {split: folder / f"part_{number:05d}.{split}.bin" for split in SPLITS}
    writers = {
        split: _PartWriter(path, dtype, mask_path(path) if recipe.has_masks else None) for split, path in paths.items()
    }
    if isinstance(item, TokenItem):
        by_source = _copy_ids(item, vocabulary, writers[item.split], advance)
    elif recipe.pairs:
        by_source = _tokenise_pairs(item, recipe, vocabulary, writers, advance, report)
    elif recipe.chat:
        by_source = _tokenise_chat(item, recipe, vocabulary, writers, advance, report)
    else:
        by_source = _tokenise(item, recipe, vocabulary, writers, advance, report)
    result: dict = {split: writer.close() for split, writer in writers.items()}
    if recipe.skips_bad_rows or not report.faults:
        with replacing(record) as temporary:
            temporary.write_text(json.dumps(result | {"by_source": by_source, "rows": report.to_json()}))
    return report


def _copy_ids(
    item: TokenItem, vocabulary: Vocabulary, writer: _PartWriter, advance: Callable[[int], object]
) -> dict[str, int]:
    """Writes ids of a token file as they are; returns their number by source."""
    lengths = vocabulary.byte_lengths()
    for ids in read_blocks(open_token_file(item.path), item.start, item.end):
        if (largest := int(ids.max())) >= len(vocabulary):
            raise UsageError(describe_largest_id(str(item.path), largest, len(vocabulary)))
        writer.write(ids)
        writer.bytes += 0 if lengths is None else int(lengths[ids].sum())
        advance(2 * len(ids))
    if item.ends:
        writer.end_document([], 0)
    return {str(item.path): item.end - item.start}


def _tokenise_chat(
    item: Item,
    recipe: Recipe,
    vocabulary: Vocabulary,
    writers: dict[str, _PartWriter],
    advance: Callable[[int], object],
    report: RowReport,
) -> dict[str, int]:
    """Writes the tokens of an item's conversations with their masks; returns their number by source."""
    by_source: collections.Counter[str] = collections.Counter()
    format = recipe.choose_format(vocabulary)
    for part in item.ranges:
        for piece in read_conversations(part.path, format, advance, report, vocabulary.letters):
            ids, offsets = vocabulary.encode_with_offsets(piece.text, recipe.name)
            trained = mask_tokens(offsets, piece.spans or ())
            trained[:1] = 0  # nothing is before the first token
            writer = writers[recipe.choose_split(item, piece)]
            writer.write_conversation(ids, trained)
            writer.bytes += len(remove_guards(piece.text)[0].encode("utf-8", "surrogatepass"))
            by_source[str(part.path)] += len(ids)
    return by_source


def _tokenise_pairs(
    item: Item,
    recipe: Recipe,
    vocabulary: Vocabulary,
    writers: dict[str, _PartWriter],
    advance: Callable[[int], object],
    report: RowReport,
) -> dict[str, int]:
    """Writes the two sides of an item's preference pairs with their masks; returns the tokens by source."""
    by_source: collections.Counter[str] = collections.Counter()
    format = recipe.choose_format(vocabulary) if recipe.chat else None
    for part in item.ranges:
        for pair in read_pairs(part.path, format, advance, report, vocabulary.letters):
            writer = writers[recipe.choose_split(item, pair.chosen)]
            for side in pair:
                ids, scored = encode_side(vocabulary, side, recipe.name)
                writer.write_conversation(ids, scored)
                writer.bytes += len((side.prompt + remove_guards(side.text)[0]).encode("utf-8", "surrogatepass"))
                by_source[str(part.path)] += len(ids)
    return by_source


def _tokenise(
    item: Item,
    recipe: Recipe,
    vocabulary: Vocabulary,
    writers: dict[str, _PartWriter],
    advance: Callable[[int], object],
    report: RowReport,
) -> dict[str, int]:
    """Writes the tokens of an item's documents; returns their number by source."""
    separator = [] if recipe.in_order or vocabulary.end_of_text is None else [vocabulary.end_of_text]
    beginning = np.array([] if list(vocabulary.beginning) == separator else vocabulary.beginning, np.int32)
    by_source: collections.Counter[str] = collections.Counter()
    starts, split, length = item.starts_a_document, item.split or "train", 0
    for source, batch in _batches(item, recipe, vocabulary.breaks, advance, report):
        for piece, prompt, ids in _encode_batch(vocabulary, batch, starts, recipe.name):
            if starts:
                split = recipe.choose_split(item, piece)
                prompt = np.concatenate([beginning, prompt])
                length = len(prompt) if piece.prompt else 0
            writer = writers[split]
            writer.write(prompt)
            writer.write(ids)
            by_source[str(source)] += len(prompt) + len(ids)
            writer.bytes += len((piece.prompt + piece.text).encode("utf-8", "surrogatepass"))
            if piece.ends:
                writer.end_document(separator, length)
            starts = piece.ends
    return by_source


def _encode_batch(
    vocabulary: Vocabulary, batch: list[Piece], starts: bool, name: str
) -> Iterator[tuple[Piece, np.ndarray, np.ndarray]]:
    """Yields each piece with the ids of its prompt and of its text; `starts`: the first one starts a document."""
    texts, firsts = [], []
    for piece in batch:
        texts += [piece.prompt, piece.text] if piece.prompt else [piece.text]
        firsts += [starts, False] if piece.prompt else [starts]
        starts = piece.ends
    encoded = iter(vocabulary.encode_pieces(texts, firsts, name))
    for piece in batch:
        prompt = next(encoded) if piece.prompt else np.zeros(0, np.int32)
        yield piece, prompt, next(encoded)


def _batches(
    item: Item, recipe: Recipe, breaks: Breaks, advance: Callable[[int], object], report: RowReport
) -> Iterator[tuple[Path, list[Piece]]]:
    """Yields the pieces of one file that are encoded together."""
    for part in item.ranges:
        batch: list[Piece] = []
        size = 0
        for piece in recipe.read_texts(part, breaks, advance, report):
            batch.append(piece)
            size += len(piece.text) + len(piece.prompt)
            if size >= BATCH:
                yield part.path, batch
                batch, size = [], 0
        if batch:
            yield part.path, batch


def _write_index(recipe: Recipe, vocabulary: Vocabulary, folder: Path, items: int, identity: str) -> None:
    """Joins the records of the parts; the index is written last."""
    parts = [json.loads((folder / f"part_{number:05d}.json").read_text()) for number in range(items)]
    splits: dict[str, dict] = {}
    contents = []
    any_prompts = any(prompt for part in parts for split in SPLITS for prompt in part[split]["prompts"])
    by_source: collections.Counter[str] = collections.Counter()
    report = RowReport()
    for part in parts:
        by_source.update(part["by_source"])
        report.merge(RowReport.from_json(part.get("rows", {})))
    for split in SPLITS:
        splits[split], content = _join_split(parts, split, folder, any_prompts)
        contents.append(content)
    if not any(entry["bytes"] for entry in splits.values()) and not any(by_source[str(p)] for p in recipe.token_files):
        shutil.rmtree(folder)
        left_out = "".join(f"; {line}" for line in report.describe())
        raise UsageError(f"{recipe.name} has no text; name files that hold some{left_out}")
    for number in range(items):
        (folder / f"part_{number:05d}.json").unlink()
    fingerprint = compute_fingerprint(vocabulary, contents)
    index = {
        "format": FORMAT,
        "identity": identity,
        "name": recipe.name,
        "tokenizer": vocabulary.name,
        "vocabulary_size": len(vocabulary),
        "validation_share": recipe.share,
        "has_documents": recipe.has_documents,
        "prompts": any_prompts,
        "chat": bool(recipe.chat),
        **({"pairs": True} if recipe.pairs else {}),
        **({"removed": recipe.removal.report} if recipe.removal else {}),
        "fingerprint": fingerprint,
        "splits": splits,
        "rows": report.to_json(),
        "sources": [
            {"path": str(path), "bytes": path.stat().st_size, "tokens": by_source[str(path)]}
            for path in recipe.every_file
        ],
    }
    for name, text in vocabulary.documents(source=recipe.name, fingerprint=fingerprint).items():
        (folder / name).write_text(text, "utf-8")
    (folder / "README.md").write_text(describe(index), "utf-8", errors="replace")
    for path in folder.iterdir():
        sync(path)
    with replacing(folder / INDEX) as temporary:
        temporary.write_text(json.dumps(index, indent=1) + "\n")


def _join_split(parts: list[dict], split: str, folder: Path, any_prompts: bool) -> tuple[dict, SplitContent]:
    """Writes the borders of one split; returns its entry in the index and its share of the fingerprint."""
    ends: list[np.ndarray] = [np.zeros(0, np.int64)]
    prompts: list[int] = []
    files: list[dict] = []
    tokens = 0
    for number, part in enumerate(parts):
        written, file = part[split], f"part_{number:05d}.{split}.bin"
        if not written["tokens"]:
            for path in (folder / file, mask_path(folder / file)):
                path.unlink(missing_ok=True)  # a start that was killed here may have removed it
            continue
        ends.append(np.array(written["ends"], np.int64) + tokens)
        prompts += written["prompts"]
        tokens += written["tokens"]
        digests = {name: written[name] for name in ("sha256", "mask_sha256") if name in written}
        files.append({"file": file, "tokens": written["tokens"]} | digests)
    all_ends = np.concatenate(ends)
    all_prompts = np.array(prompts, np.int32) if any_prompts else None
    np.save(folder / f"{split}.ends.npy", all_ends)
    if all_prompts is not None:
        np.save(folder / f"{split}.prompts.npy", all_prompts)
    size = sum(part[split]["bytes"] for part in parts)
    entry = {"tokens": tokens, "bytes": size, "documents": len(all_ends), "parts": files}
    return entry, SplitContent(split, digests_of(files), all_ends, all_prompts)


def describe(index: dict) -> str:
    """Returns the text of the README.md of a prepared folder."""
    rows = "\n".join(
        f"| {split} | {entry['tokens']:,} | {entry['documents']:,} | {entry['bytes']:,} |"
        for split, entry in index["splits"].items()
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
