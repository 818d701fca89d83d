"""The rows of metrics.csv as TensorBoard events."""

import contextlib
from collections.abc import Iterator
from pathlib import Path

from shardformer.errors import RunError

# TensorBoard groups its charts by what stands before the slash.
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
}
_FLUSH_EVENTS_MS = 5000


class Events:
    """TensorBoard's form of the rows.

    `tf.summary.scalar` needs the tensorboard package, which TensorFlow no longer brings along; `tf.summary.write`
    does not, and with this metadata TensorBoard shows the same charts.
    """

    def __init__(self, folder: Path, new: bool):
        from shardformer.data.tensorflow import import_tensorflow  # takes seconds: only where events are written

        self._tf = import_tensorflow()
        if new:  # the curves of an earlier run in this folder would be drawn into those of this one
            for earlier in folder.glob("events.out.tfevents.*"):
                earlier.unlink()
        self._folder = folder
        self._writer = self._new_file()
        self._metadata = self._tf.compat.v1.SummaryMetadata(data_class="DATA_CLASS_SCALAR")
        self._metadata.plugin_data.plugin_name = "scalars"

    def write(self, step: int, numbers: dict[str, float]) -> None:
        self._writer = self._writer or self._new_file()
        with self._told(), self._writer.as_default(step):
            for key in TAGS.keys() & numbers.keys():
                value = self._tf.constant(numbers[key], self._tf.float32)
                self._tf.summary.write(TAGS[key], value, metadata=self._metadata)

    def close(self) -> None:
        if self._writer:
            with self._told():
                self._writer.close()

    def _new_file(self):
        with self._told():
            return self._tf.summary.create_file_writer(  # a short queue would flush at every few rows
                str(self._folder), max_queue=10_000, flush_millis=_FLUSH_EVENTS_MS, filename_suffix=".v2"
            )

    @contextlib.contextmanager
    def _told(self) -> Iterator[None]:
        """A full disk ends this file, which nobody reads beyond a torn event; the next numbers go into a new one."""
        try:
            yield
        except self._tf.errors.OpError as error:
            self._writer = None
            problem = error.message.rpartition("; ")[2].partition("\n")[0]
            raise RunError(f"cannot write TensorBoard's events in {self._folder}: {problem}") from None
