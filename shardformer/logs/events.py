"""The rows of metrics.csv as TensorBoard events."""

import itertools
import os
import socket
import struct
import time
from pathlib import Path

import numpy as np

from shardformer.data.record_format import format_record
from shardformer.files import check_no_link

# TensorBoard groups its charts by the part before the slash.
TAGS = {
    "loss": "train/loss",
    "val_loss": "validation/loss",
    "z_loss": "train/z_loss",
    "accuracy": "train/accuracy",
    "val_accuracy": "validation/accuracy",
    "grad_norm": "optimizer/grad_norm",
    "update_norm": "optimizer/update_norm",
    "lr": "optimizer/learning_rate",
    "tokens_per_s": "speed/tokens_per_s",
    "save_s": "speed/save_s",
    "data_s": "speed/data_s",
    "val_nats_per_byte": "validation/nats_per_byte",
    "val_bits_per_byte": "validation/bits_per_byte",
    "peak_bytes": "memory/peak_bytes",
    "mfu": "speed/mfu",
}
_VERSION = b"brain.Event:2"  # TensorBoard rejects a file whose first event has no version
_VARINT, _FIXED64, _BYTES = 0, 1, 2  # the types of fields on the wire
_FLOAT, _SCALAR = 1, 1  # DT_FLOAT of types.proto, DATA_CLASS_SCALAR of summary.proto
_numbers = itertools.count()  # of the files of this process


class TensorBoardEvents:
    """The observer that writes TensorBoard event files.

    It encodes the messages of event.proto and summary.proto itself: the import of TensorFlow takes more time than the
    rest of a start, and the tensorboard package is not among the requirements.
    """

    def __init__(self, folder: Path, new: bool):
        check_no_link(folder)
        # TensorBoard would merge the curves of an earlier run in this folder with the curves of this run.
        if new:
            for earlier in folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        self._folder = folder
        self._file: int | None = None  # its descriptor

    def write(self, row: dict) -> None:
        values = {tag: row[key] for key, tag in TAGS.items() if row.get(key) is not None}
        try:
            if self._file is None:
                self._file = self._open_file()
                _write_all(self._file, format_record(format_version(time.time())))
            _write_all(self._file, format_record(format_event(time.time(), row["step"], values)))
        except OSError as error:
            self.close()  # readers stop at a torn event, so the next row starts a new file
            raise OSError(f"cannot write in {self._folder}: {error.strerror}") from None

    def close(self) -> None:
        if self._file is not None:
            file, self._file = self._file, None
            os.close(file)

    def _open_file(self) -> int:
        self._folder.mkdir(exist_ok=True)  # not its parents: a run folder that was moved stays away
        stamp = f"{int(time.time()):010}.{socket.gethostname()}.{os.getpid()}.{next(_numbers)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
        return os.open(self._folder / f"events.out.tfevents.{stamp}.v2", flags, 0o666)


def format_version(now: float) -> bytes:
    """Returns the Event that a file starts with."""
    return _field(1, _FIXED64, struct.pack("<d", now)) + _field(3, _BYTES, _VERSION)


def format_event(now: float, step: int, values: dict[str, float]) -> bytes:
    """Returns the Event with the scalars of a step, by tag."""
    summary = b"".join(_field(1, _BYTES, _format_value(tag, value)) for tag, value in values.items())
    return _field(1, _FIXED64, struct.pack("<d", now)) + _field(2, _VARINT, _varint(step)) + _field(5, _BYTES, summary)


def _format_value(tag: str, value: float) -> bytes:
    """Returns a Summary.Value: a scalar tensor for the plugin `scalars`, as TensorFlow 2 writes it."""
    plugin = _field(1, _BYTES, b"scalars")
    metadata = _field(1, _BYTES, plugin) + _field(4, _VARINT, _varint(_SCALAR))
    shape = _field(2, _BYTES, b"")  # of no dimension
    tensor = _field(1, _VARINT, _varint(_FLOAT)) + shape + _field(5, _BYTES, np.float32(value).tobytes())
    return _field(1, _BYTES, tag.encode()) + _field(8, _BYTES, tensor) + _field(9, _BYTES, metadata)


def _field(number: int, type_: int, content: bytes) -> bytes:
    """Returns a field of a protobuf message."""
    length = _varint(len(content)) if type_ == _BYTES else b""
    return _varint(number << 3 | type_) + length + content


def _varint(value: int) -> bytes:
    """Returns a number of 0 or more in groups of 7 bits, the lowest first; the highest bit marks that more follow."""
    groups = bytearray()
    while value > 0x7F:
        groups.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*groups, value])


def _write_all(file: int, content: bytes) -> None:
    """Writes all of the content: a nearly full disk accepts a part of it first."""
    while content:
        content = content[os.write(file, content) :]
