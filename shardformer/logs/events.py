"""The rows of metrics.csv as TensorBoard events."""

import os
from pathlib import Path
from typing import Any

import numpy as np

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
_FLUSH_EVENTS_MS = 5000


class TensorBoardEvents:
    """The observer that writes TensorBoard event files.

    `tf.summary.scalar` needs the tensorboard package, which TensorFlow does not depend on. `tf.summary.write` does
    not need it, and with this metadata TensorBoard shows the same charts.
    """

    def __init__(self, folder: Path, new: bool):
        from shardformer.data.tensorflow import import_tensorflow  # needs seconds, so only where events are written

        self._tf = import_tensorflow()
        # TensorBoard would merge the curves of an earlier run in this folder with the curves of this run.
        # The target of a link may be shared by other runs, so its files stay.
        if new and not folder.is_symlink():
            for earlier in folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        self._folder = folder
        self._writer: Any = None  # TensorFlow has no types
        self._metadata = self._tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, row: dict) -> None:
        try:
            self._writer = self._writer or self._open_file()
            # TensorFlow would keep a Python number for ever, in its cache of scalars.
            with self._writer.as_default(self._tf.constant(np.int64(row["step"]))):
                for key, tag in TAGS.items():
                    if row.get(key) is not None:
                        value = self._tf.constant(np.float32(row[key]))
                        self._tf.summary.write(tag, value, metadata=self._metadata)
        except self._tf.errors.OpError as error:
            self._writer = None  # readers stop at a torn event, so the next row starts a new file
            raise self._describe(error) from None

    def close(self) -> None:
        try:
            if self._writer:
                self._writer.close()
        except self._tf.errors.OpError as error:
            raise self._describe(error) from None

    def _open_file(self) -> Any:
        return self._tf.summary.create_file_writer(  # a short queue would flush every few rows
            os.fsencode(self._folder), max_queue=10_000, flush_millis=_FLUSH_EVENTS_MS, filename_suffix=".v2"
        )

    def _describe(self, error: Any) -> OSError:
        return OSError(f"cannot write in {self._folder}: {error.message.rpartition('; ')[2].partition(chr(10))[0]}")
