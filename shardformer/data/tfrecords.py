"""GPT-J's TFRecords: an index file names them; a record is a tf.train.Example with an int64 list `text`.

A pass over the records' headers makes them addressable, so that any order and any step can be read without replay.
"""

import dataclasses
import functools
import hashlib
import math
import os
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import numpy as np

from shardformer.data.packed_files import check_expansion
from shardformer.data.record_format import crc32c, format_record, mask_checksum
from shardformer.data.tensorflow import import_tensorflow
from shardformer.data.tokens import MappedFile, fingerprint_file, name_spans
from shardformer.data.vocabulary import MAX_IDS
from shardformer.data.windows import Batch, RowLayout, Windows
from shardformer.errors import RunError, UsageError
from shardformer.files import open_regular, read_text, replacing
from shardformer.storage import BucketPath, is_url, location
from shardformer.storage.local_copy import copy_files

SUFFIXES = (".tfrecords", ".tfrecord")
FEATURE = "text"
_HEADER = struct.Struct("<QI")  # of a record: its length, and that number's masked checksum


@dataclasses.dataclass(frozen=True, eq=False)
class RecordFile:
    """One file, and the borders of the contents of its records."""

    path: Path
    content: MappedFile  # its bytes
    starts: np.ndarray
    ends: np.ndarray

    @staticmethod
    def open(path: Path) -> "RecordFile":
        try:
            with open_regular(path) as file:
                size = os.fstat(file.fileno()).st_size
            content = MappedFile(path, np.dtype(np.uint8), size)
            mapped = content[:].data if size else memoryview(b"")
        except (OSError, ValueError) as error:  # a line of an index may hold what no path can
            raise UsageError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}") from None
        starts: list[int] = []
        ends: list[int] = []
        offset = 0
        while offset < size:
            if offset + _HEADER.size > size:
                raise UsageError(f"{path} is truncated in record {len(starts)}")
            length, _ = _HEADER.unpack_from(mapped, offset)
            starts.append(offset + _HEADER.size)
            ends.append(starts[-1] + length)
            offset = ends[-1] + 4
            if offset > size:
                broken = f"it is {length:,} bytes long, and {size - starts[-1]:,} are left"
                raise UsageError(f"{path} is truncated or damaged in record {len(starts) - 1}: {broken}")
        result = RecordFile(path, content, np.array(starts, np.int64), np.array(ends, np.int64))
        if len(starts):
            result._check_headers()
        return result

    def __len__(self) -> int:
        return len(self.starts)

    def ids(self, record: int) -> np.ndarray:
        """Returns the ids of a record; raises RunError if its checksum is wrong."""
        start, end = int(self.starts[record]), int(self.ends[record])
        content = self.content[start:end]
        stored = int(self.content[end : end + 4].view("<u4")[0])
        if mask_checksum(crc32c(content[None]))[0] != stored:
            raise RunError(f"{self.path}, record {record}: its checksum is wrong; the file is damaged")
        ids = _parse_example(content.tobytes())
        if ids is None or not all(0 <= edge < MAX_IDS for edge in (ids.min(initial=0), ids.max(initial=0))):
            raise RunError(f"{self.path}, record {record}: it is not a tf.train.Example with token ids in `text`")
        return ids

    def _check_headers(self) -> None:
        lengths = (self.ends - self.starts).astype("<u8").view(np.uint8).reshape(-1, 8)
        stored = self.content[(self.starts - 4)[:, None] + np.arange(4)].view("<u4")[:, 0]
        wrong = np.flatnonzero(mask_checksum(crc32c(lengths)) != stored)
        if wrong.size:
            raise UsageError(f"{self.path}, record {wrong[0]}: its header's checksum is wrong; the file is damaged")


class Records:
    """All records of an index, in its order."""

    def __init__(self, name: str, files: list[RecordFile]):
        self.name, self.files = name, [file for file in files if len(file)]
        if not self.files:
            raise UsageError(f"{name} has no records")
        self.ids_per_record = len(self.files[0].ids(0))

    @staticmethod
    def open(path: Path, cache: Path | None = None, origin: BucketPath | None = None) -> "Records":
        """Opens an index file, with a path a line, or one .tfrecords file; `origin` is its location in a bucket."""
        if path.suffix in SUFFIXES:
            return Records(str(path), [RecordFile.open(_unpack(path, cache))])
        try:
            lines = [line.strip() for line in read_text(path).splitlines() if line.strip()]
        except UnicodeDecodeError:
            raise UsageError(f"{path} is not an index of TFRecords: expected a path on every line") from None
        files = _find_files(origin or path, lines)
        return Records(str(path), [RecordFile.open(_unpack(file, cache)) for file in files])

    @property
    def size(self) -> int:
        return sum(map(len, self.files)) * self.ids_per_record

    @functools.cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(" ".join(fingerprint_file(file.path) for file in self.files).encode()).hexdigest()

    def largest_id(self) -> int:
        """Reads all records and returns their largest id."""
        return max(int(file.ids(record).max(initial=0)) for file in self.files for record in range(len(file)))

    def splits(self, share: float) -> dict[str, "RecordSplit"]:
        """Returns the splits; the last shares of the records are validation and test."""
        total = sum(map(len, self.files))
        held_out = math.ceil(total * share)
        borders = [0, max(total - 2 * held_out, 0), max(total - held_out, 0), total]
        return {split: RecordSplit(self, *span) for split, span in name_spans(borders).items()}


def _find_files(index: Path | BucketPath, lines: list[str]) -> list[Path]:
    """Returns the files that an index names; paths may begin at its folder, and files in a bucket are copied."""

    def find(line: str) -> Path | BucketPath:
        if is_url(line):
            return location(line)
        return Path(line) if Path(line).exists() else index.parent / line

    places = [find(line) for line in lines]
    away = [path for path in places if isinstance(path, BucketPath)]
    copies = dict(zip(away, copy_files(f"the files of {index}", away) if away else [], strict=True))
    return [copies[path] if isinstance(path, BucketPath) else path for path in places]


@dataclasses.dataclass(frozen=True)
class RecordSplit:
    """The records from `start` to `end`."""

    is_chat: ClassVar[bool] = False
    is_pairs: ClassVar[bool] = False
    records: Records
    start: int
    end: int

    @property
    def tokens(self) -> "RecordSplit":
        return self

    @property
    def name(self) -> str:
        return self.records.name

    def __len__(self) -> int:
        return (self.end - self.start) * self.records.ids_per_record

    def make_windows(self, layout: RowLayout) -> "RecordWindows":
        return RecordWindows(self, layout)

    def describe(self, name: str, layout: RowLayout) -> list[str]:
        return []


class RecordWindows(Windows):
    """Rows from records, which hold one id more than the tokens that they give."""

    def __init__(self, split: RecordSplit, layout: RowLayout):
        given = split.records.ids_per_record - 1
        if layout.weighs_targets:
            raise UsageError(f"{split.name}: TFRecords hold no documents; leave out documents= and mask_prompt=")
        if given < 1 or given % layout.seq:
            raise UsageError(
                f"a record of {split.name} holds {given + 1} ids, which give {given} tokens; seq={layout.seq} does not "
                f"divide that; give seq={given}"
            )
        self._split, self._seq, self._rows_per_record = split, layout.seq, given // layout.seq
        self._ends = np.cumsum([len(file) for file in split.records.files])
        self.count = self.covering = (split.end - split.start) * self._rows_per_record

    def gather(self, rows: np.ndarray, shifts: np.ndarray | int = 0, weighted: bool = True) -> Batch:
        ids, weights = np.zeros((len(rows), self._seq + 1), np.int32), np.ones((len(rows), self._seq), np.float32)
        for at, row in enumerate(np.asarray(rows).tolist()):
            if row >= self.count:
                weights[at] = 0
                continue
            record, offset = divmod(row, self._rows_per_record)
            ids[at] = self._read(self._split.start + record)[offset * self._seq :][: self._seq + 1]
        return {"tokens": ids[:, :-1], "targets": ids[:, 1:]} | ({"weights": weights} if weighted else {})

    def rows_in_file_order(self, step: int, batch: int) -> np.ndarray:
        """Returns the rows of a step as mesh-transformer-jax reads them: without the last, partial batch of a file."""
        borders = np.clip(np.concatenate([[0], self._ends]), self._split.start, self._split.end) - self._split.start
        starts, sizes = borders[:-1] * self._rows_per_record, np.diff(borders) * self._rows_per_record
        last_batches = np.cumsum(sizes // batch)
        if not last_batches[-1]:
            raise UsageError(
                f"no file of {self._split.name} has batch={batch} records, and order=file reads whole batches; "
                "give a smaller batch, or order=epoch"
            )
        step %= int(last_batches[-1])
        file = int(np.searchsorted(last_batches, step, side="right"))
        number = step - (int(last_batches[file - 1]) if file else 0)
        return starts[file] + number * batch + np.arange(batch)

    def _read(self, record: int) -> np.ndarray:
        file = int(np.searchsorted(self._ends, record, side="right"))
        result = self._split.records.files[file]
        inside = record - (int(self._ends[file - 1]) if file else 0)
        ids = result.ids(inside)
        if len(ids) != self._split.records.ids_per_record:
            raise RunError(
                f"{result.path}, record {inside} holds {len(ids)} ids, the first one "
                f"{self._split.records.ids_per_record}; all must have as many"
            )
        return ids


def write_records(path: Path, rows: Iterable[np.ndarray]) -> None:
    """Writes Examples with an int64 list `text` to a .tfrecords file, as create_finetune_tfrecords.py does."""
    with replacing(path) as temporary, open(temporary, "wb") as file:
        for row in rows:
            file.write(format_record(_format_example(row)))


def _parse_example(content: bytes) -> np.ndarray | None:
    """Returns the int64 list `text` of a tf.train.Example; None if it has none."""
    try:
        features = import_tensorflow().train.Example.FromString(content).features.feature
    except Exception:  # an exception of protobuf that TensorFlow does not export
        return None
    return np.array(features[FEATURE].int64_list.value, np.int64) if FEATURE in features else None


def _format_example(ids: np.ndarray) -> bytes:
    train = import_tensorflow().train
    feature = train.Feature(int64_list=train.Int64List(value=ids))
    return train.Example(features=train.Features(feature={FEATURE: feature})).SerializeToString()


def _unpack(path: Path, cache: Path | None) -> Path:
    """Returns the path, or an unpacked copy in the cache: mesh-transformer-jax reads paths with 'zstd' as ZLIB."""
    if "zstd" not in str(path) or not path.exists():
        return path
    stat = path.stat()
    stamp = f"{stat.st_size} {stat.st_mtime_ns} {stat.st_ctime_ns} {stat.st_ino}"  # cp -p keeps size and mtime
    key = hashlib.sha256(os.fsencode(f"{path.resolve()} {stamp}")).hexdigest()[:16]
    unpacked = (cache or path.parent) / f"{path.stem}-{key}.tfrecords"
    if unpacked.exists():
        return unpacked
    os.makedirs(unpacked.parent, exist_ok=True)
    stream = zlib.decompressobj()
    try:
        with replacing(unpacked) as temporary, open(path, "rb") as packed, open(temporary, "wb") as file:
            while content := packed.read(1 << 16):
                file.write(stream.decompress(content))
                check_expansion(path, file.tell())
            file.write(stream.flush())
            if not stream.eof:
                raise UsageError(f"{path} is truncated: its ZLIB stream is incomplete")
    except zlib.error as error:
        raise UsageError(f"{path} has 'zstd' in its path, so that ZLIB is expected in it: {error}") from None
    return unpacked
