"""The text files that a path, a folder or a pattern names."""

import collections
import glob
import os
from collections.abc import Iterator
from pathlib import Path

from shardformer.data import table_files, text_files
from shardformer.data.packed_files import find_suffix
from shardformer.data.vocabulary import FILE as VOCABULARY
from shardformer.errors import UsageError
from shardformer.messages import log
from shardformer.tables import format_count

TEXT_FILES = (".txt", ".md", ".rst", ".tex", ".html", ".xml", ".json", ".csv", ".py", ".pyi", ".ipynb", ".c", ".h",
              ".cc", ".cpp", ".hpp", ".cu", ".java", ".kt", ".go", ".rs", ".js", ".ts", ".jsx", ".tsx", ".sh", ".rb",
              ".pl", ".php", ".swift", ".scala", ".hs", ".ml", ".jl", ".r", ".lua", ".sql", ".toml", ".yaml", ".yml",
              *text_files.JSON_LINES, *table_files.TABLES)  # fmt: skip
PROSE = (".txt", ".md", ".rst", ".html", ".csv")  # of TEXT_FILES: the rest are code, which may start as JSON does
TOKEN_FILES = (".bin", ".npy")
RECORD_FILES = (".tfrecords", ".tfrecord", ".index")
TABLES = (".feather", ".orc", ".avro")  # of text, in formats that are not read
PACKED_OTHERWISE = (".zip", ".xz", ".bz2", ".7z", ".tar", ".tgz", ".lz4")
MAX_NAMED = 8  # suffixes in one line


def list_files(name: str, path: Path, out: Path | None, expected: str, key: str = "data") -> list[Path]:
    """Lists the text files below a folder or of a pattern, without those of runs; messages call the name `key=`."""
    if path.is_dir():
        if saved := table_files.list_saved(path):
            return saved
        return _list_folder(f"{key}={name}", path, out, expected)
    if path.is_file():
        return [path]
    if path.exists():
        raise UsageError(
            f"{key}={name} is a device or a pipe, which cannot be read twice; write the text into a file and give that"
        )
    files = sorted({file.resolve(): file for file in _expand(str(path)) if file.is_file()}.values())
    if not files:
        raise UsageError(f"{key}={name} does not exist; {expected}")
    base = Path(os.path.dirname(str(path)[: next((i for i, c in enumerate(str(path)) if c in "*?["), 0)]) or ".")
    retained = [file for file in files if not _is_in_a_run(file, base, out)]
    if rest := len(files) - len(retained):
        log.info(f"{key}={name}: left out: {format_count(rest, 'file')} in folders of runs or prepared data")
    if not retained:
        raise UsageError(f"{key}={name} names only files of runs or of prepared data; name texts")
    return retained


def check_suffix(path: Path) -> None:
    """Raises UsageError for a file that is known to hold no plain text."""
    suffix = path.suffix.lower()
    if suffix in TABLES:
        raise UsageError(
            f"data={path} is a table, which is not read here; write its text as .parquet or .jsonl, as pandas does: "
            "read_feather(FILE).to_json('x.jsonl', orient='records', lines=True)"
        )
    if suffix in TOKEN_FILES + RECORD_FILES:
        joined = ", or join several: data prepare FILE ... out=FOLDER" if suffix in TOKEN_FILES else ""
        raise UsageError(f"data={path} holds token ids, not text; train on it as it is: data={path}{joined}")
    if suffix in PACKED_OTHERWISE:
        raise UsageError(f"data={path} is packed in a way that is not read here; unpack it, or pack it as .gz or .zst")


def is_code(path: Path) -> bool:
    """Returns whether a file's suffix is that of code or of settings."""
    suffix = find_suffix(path)
    return suffix in TEXT_FILES and suffix not in PROSE


def _list_folder(name: str, folder: Path, out: Path | None, expected: str) -> list[Path]:
    every = sorted(file for file in folder.rglob("*") if file.is_file() and not _is_hidden(file.relative_to(folder)))
    outside = [file for file in every if not _is_in_a_run(file, folder, out)]
    text_files = [file for file in outside if _has_text_suffix(file)]
    text_files = [
        file for file in text_files if table_files.is_table(file)
    ] or text_files  # a data set's README is not data
    rest = collections.Counter(file.suffix.lower() or "no suffix" for file in set(outside) - set(text_files))
    if tables := [suffix for suffix in TABLES if rest[suffix]]:
        raise UsageError(
            f"{name} has {sum(rest[suffix] for suffix in tables):,} {tables[0]} files, which are not read here; "
            f"write their text as .jsonl, or name the other texts: '{name}/**/*.md'"
        )
    if not text_files:
        contents = f"; it has {_describe(rest)}" if rest else ""
        known = ", ".join(TEXT_FILES[:8])
        raise UsageError(f"{name} is a folder without text files ({known}, ...){contents}; {expected}")
    if rest:
        log.info(f"{name}: {format_count(len(text_files), 'text file')}; left out: {_describe(rest)}")
    if len(outside) < len(every):
        log.info(f"{name}: left out: {format_count(len(every) - len(outside), 'file')} of runs or prepared data")
    return text_files


def _describe(rest: collections.Counter[str]) -> str:
    named = ", ".join(f"{count:,} {suffix}" for suffix, count in rest.most_common(MAX_NAMED))
    return named + (", ..." if len(rest) > MAX_NAMED else "")


def _is_hidden(path: Path) -> bool:
    return any(part.startswith((".", "__pycache__")) for part in path.parts)


def _has_text_suffix(path: Path) -> bool:
    return find_suffix(path) in TEXT_FILES


def _is_in_a_run(file: Path, base: Path, out: Path | None) -> bool:
    """Returns whether a file below `base` is in a run, a checkpoint or a prepared folder, or in the run that starts."""
    for folder in file.parents:
        if folder == base or len(folder.parts) < len(base.parts):
            return False
        if (folder / VOCABULARY).exists() or (out is not None and folder.resolve() == out.resolve()):
            return True
    return False


def _expand(pattern: str) -> Iterator[Path]:
    """Yields the files of a pattern. `**` visits each folder once: a link to a folder above it would have no end."""
    head, separator, tail = pattern.partition("**")
    if not separator or (head and not head.endswith("/")) or (tail and not tail.startswith("/")):
        yield from map(Path, glob.glob(pattern))
        return
    for base in glob.glob(head or "./"):
        for folder in _walk(base, set()):
            below = os.path.join(glob.escape(folder), tail.lstrip("/") or "*")
            yield from (Path(os.path.normpath(file)) for file in _expand(below))


def _walk(folder: str, seen: set[tuple[int, int]]) -> Iterator[str]:
    """Yields a folder and those below it, links among them; no folder twice."""
    try:
        status = os.stat(folder)
        entries = sorted(os.listdir(folder))
    except OSError:
        return
    if (status.st_dev, status.st_ino) in seen:
        return
    seen.add((status.st_dev, status.st_ino))
    yield folder
    for entry in entries:
        below = os.path.join(folder, entry)
        if not entry.startswith(".") and os.path.isdir(below):
            yield from _walk(below, seen)
