"""The rows of metrics.csv in TensorBoard's events, read back by TensorFlow."""

import sys

import numpy as np
import pytest

from shardformer.data.tensorflow import import_tensorflow
from shardformer.errors import UsageError
from shardformer.logs.events import TAGS, TensorBoardEvents
from shardformer.logs.metrics_file import COLUMNS
from tests.shared import room

NUMBERS = {key: float(place) for place, key in enumerate(TAGS, start=1)}


def write(folder, *rows, new=True):
    events = TensorBoardEvents(folder, new)
    for row in rows:
        events.write(row)
    events.close()


def read(folder, files=None):
    tf = import_tensorflow()
    files = sorted(str(path) for path in files or folder.iterdir())
    parsed = [tf.compat.v1.Event.FromString(raw.numpy()) for raw in tf.data.TFRecordDataset(files)]
    found = [(event.step, value) for event in parsed for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for _, value in found} <= {"scalars"}
    return {(step, value.tag, float(tf.make_ndarray(value.tensor))) for step, value in found}


def test_tensorboard_gets_every_number_at_the_steps_of_the_run(tmp_path):
    write(tmp_path, {"step": 7, **NUMBERS, "elapsed_s": 1.0})
    write(tmp_path, {"step": 9, "loss": 4 / 9, "val_loss": None}, new=False)
    assert read(tmp_path) == {(7, TAGS[key], number) for key, number in NUMBERS.items()} | {
        (9, "train/loss", np.float32(4 / 9))
    }
    assert set(TAGS) == set(COLUMNS) - {"step", "elapsed_s"}


def test_a_new_run_starts_new_curves(tmp_path):
    write(tmp_path, {"step": 20, "loss": 1.0})
    write(tmp_path, {"step": 10, "loss": 1.0})
    assert {step for step, *_ in read(tmp_path)} == {10}


def test_no_number_stays_in_memory(tmp_path):
    events, step, number = TensorBoardEvents(tmp_path, new=True), 10**9 + 7, 1.0 / 7.0
    before = sys.getrefcount(step), sys.getrefcount(number)
    events.write({"step": step, "loss": number})
    events.close()
    assert (sys.getrefcount(step), sys.getrefcount(number)) == before


def test_linked_events_folder_is_rejected(tmp_path):
    write(tmp_path / "shared", {"step": 20, "loss": 1.0})
    (tmp_path / "tensorboard").symlink_to("shared")
    with pytest.raises(UsageError, match="tensorboard is a link to shared, and nothing is written"):
        TensorBoardEvents(tmp_path / "tensorboard", new=True)
    assert read(tmp_path / "shared") == {(20, "train/loss", 1.0)}


def test_after_a_full_disk_events_continue_in_a_new_file(tmp_path):
    events = TensorBoardEvents(tmp_path, new=True)
    events.write({"step": 1, **NUMBERS})
    (first,) = tmp_path.iterdir()
    with room(first.stat().st_size + 100), pytest.raises(OSError, match=rf"^cannot write in {tmp_path}: File too"):
        events.write({"step": 2, **NUMBERS})
    events.write({"step": 3, "loss": 2.0})
    events.close()
    (second,) = set(tmp_path.iterdir()) - {first}
    assert read(tmp_path, [second]) == {(3, "train/loss", 2.0)}


def test_moved_run_folder_is_not_created_again(tmp_path):
    events = TensorBoardEvents(tmp_path / "moved" / "tensorboard", new=True)
    with pytest.raises(OSError, match=r"^cannot write in .*: No such file"):
        events.write({"step": 1, "loss": 2.0})
    assert not (tmp_path / "moved").exists()


def test_large_steps_and_non_finite_values_are_read_back(tmp_path):
    write(tmp_path, {"step": 2**40 + 300, "loss": float("inf")})
    assert read(tmp_path) == {(2**40 + 300, "train/loss", float("inf"))}


def test_a_folder_whose_name_is_not_utf8(tmp_path):
    folder = tmp_path / b"caf\xe9".decode("utf-8", "surrogateescape")
    write(folder, {"step": 1, "loss": 2.0})
    (file,) = folder.iterdir()
    assert b"train/loss" in file.read_bytes()
