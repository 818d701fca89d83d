"""Rows of Parquet and Arrow files as records, and the files of a data set that `datasets` saved to disk."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

from shardformer.errors import UsageError
from shardformer.files import read_text

TABLES = (".parquet", ".arrow")
STATE, SPLITS = "state.json", "dataset_dict.json"  # of a data set, and of a folder of its splits
BATCH = 1024  # rows that are read at a time
NEEDS = "needs the package pyarrow; install it: pip install pyarrow"


def is_table(path: Path) -> bool:
    return path.suffix.lower() in TABLES


def read_table(path: Path, advance: Callable[[int], object] = lambda _: None) -> Iterator[tuple[bytes, str]]:
    """Yields each row as a line of JSON, with its name in errors; fields that a row lacks are left out."""
    try:
        import pyarrow
    except ModuleNotFoundError:
        raise UsageError(f"data={path} {NEEDS}") from None
    number = 0
    try:
        for batch in _open_batches(path):
            for row in batch.to_pylist():
                number += 1
                # A value that JSON lacks, for example bytes, becomes null: no text.
                yield json.dumps(_drop_missing(row), default=lambda _: None).encode(), f"{path}, row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise UsageError(f"data={path} cannot be read as a table: {error!s:.200}") from None
    advance(path.stat().st_size)


def list_saved(folder: Path) -> list[Path] | None:
    """Returns the files of a data set that `datasets` saved to disk; None for another folder."""
    if (folder / SPLITS).is_file() and not (folder / STATE).exists():
        raise UsageError(f"data={folder} is a folder of splits; name one: data={folder}/train validation={folder}/test")
    if not (folder / STATE).is_file():
        return None
    try:
        state = json.loads(read_text(folder / STATE))
        names = [entry["filename"] for entry in state["_data_files"]]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None  # another program's state
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise UsageError(f"data={folder} chooses rows by an index; save it again after flatten_indices()")
    files = [folder / Path(name).name for name in names]
    if missing := next((file for file in files if not file.is_file()), None):
        raise UsageError(f"data={folder} lacks {missing.name}, which its {STATE} names; copy the folder again")
    return files


def _open_batches(path: Path) -> Iterator:
    import pyarrow

    if path.suffix.lower() == ".parquet":
        import pyarrow.parquet

        with pyarrow.parquet.ParquetFile(path) as file:
            yield from file.iter_batches(BATCH)
        return
    with pyarrow.memory_map(str(path)) as source:
        try:
            reader = pyarrow.ipc.open_stream(source)
        except pyarrow.ArrowInvalid:
            source.seek(0)
            reader = pyarrow.ipc.open_file(source)
            yield from (reader.get_batch(n) for n in range(reader.num_record_batches))
            return
        yield from reader


def _drop_missing(value):
    """Returns the value without fields that are null: a table gives every row the fields of all rows."""
    if isinstance(value, dict):
        return {name: _drop_missing(item) for name, item in value.items() if item is not None or name == "content"}
    return [_drop_missing(item) for item in value] if isinstance(value, list) else value
