"""metrics.csv through crashes and resumes, and the same numbers in TensorBoard's events."""

import contextlib
import math
import resource
import subprocess
import sys

import numpy as np
import pytest

from shardformer.data.tensorflow import import_tensorflow
from shardformer.errors import RunError
from shardformer.logs import metrics_file
from shardformer.logs.events import TAGS
from shardformer.logs.metrics_file import COLUMNS, Records

HEADER = "step,loss,val_loss,z_loss,accuracy,val_accuracy,grad_norm,update_norm,lr,tokens_per_s,elapsed_s,save_s\n"


def write(out, steps, first_step=0, **more):
    with Records(out, first_step) as run:
        for step in steps:
            run.write({"step": step, "loss": 4.0 / step, "elapsed_s": step / 10, **more})


def text(out):
    return (out / "metrics.csv").read_text()


def test_the_columns_that_scripts_of_others_rely_on(tmp_path):
    write(tmp_path, [])
    assert text(tmp_path) == HEADER


def test_an_absent_value_is_an_empty_cell(tmp_path):
    write(tmp_path, [1], val_loss=None, lr=0.001)
    assert text(tmp_path) == HEADER + "1,4.0,,,,,,,0.001,,0.1,\n"


def test_float32_numbers_come_back_bitwise(tmp_path):
    values = [np.float32(1) / 3, np.float32(1e-38), np.float32(3.4e38), np.float32(np.inf), np.float32(np.nan)]
    with Records(tmp_path) as run:
        for step, value in enumerate(values, start=1):
            run.write({"step": np.int32(step), "loss": value})
    back = np.array(metrics_file.read(tmp_path)["loss"], np.float32)
    assert back.tobytes() == np.array(values).tobytes()


def test_a_row_is_on_disk_before_the_next_step(tmp_path):
    with Records(tmp_path) as run:
        run.write({"step": 1, "loss": 2.0})
        assert metrics_file.read(tmp_path)["loss"] == [2.0]


def test_rows_that_are_not_metrics_are_refused(tmp_path):
    with Records(tmp_path) as run:
        with pytest.raises(ValueError, match="unknown keys losss"):
            run.write({"step": 1, "losss": 2.0})
        with pytest.raises(ValueError, match="no step"):
            run.write({"loss": 2.0})
    assert text(tmp_path) == HEADER


@contextlib.contextmanager
def room(nbytes):
    """For so many bytes of a file: a real refusal, after a real short write."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_rows_that_find_no_room_are_told_of_and_written_when_there_is_some(tmp_path):
    with Records(tmp_path) as run:
        run.write({"step": 1, "loss": 4.0})
        with room(len(text(tmp_path)) + 5):
            for step in (2, 3):
                with pytest.raises(RunError, match=rf"^cannot write {tmp_path}/metrics\.csv: .*File too large"):
                    run.write({"step": step, "loss": 4.0 / step})
                assert metrics_file.read(tmp_path)["step"] == [1]
        run.write({"step": 4, "loss": 1.0})
        whole = text(tmp_path)
    assert metrics_file.read(tmp_path)["loss"] == [4.0, 2.0, 4 / 3, 1.0]
    with Records(tmp_path / "roomy") as run:
        for step in range(1, 5):
            run.write({"step": step, "loss": 4.0 / step})
    assert text(tmp_path / "roomy") == whole


def test_the_end_finds_no_room_either_and_raises_nothing(tmp_path):
    run = Records(tmp_path).__enter__()
    run.write({"step": 1, "loss": 4.0})
    with room(1):
        with pytest.raises(RunError, match="File too large"):
            run.write({"step": 2, "loss": 4.0})
        run.__exit__(None, None, None)
    assert metrics_file.read(tmp_path)["step"] == [1]


def test_events_that_find_no_room_are_told_of_and_go_on_in_a_new_file(tmp_path):
    numbers = dict.fromkeys(TAGS, 1.0)
    with Records(tmp_path) as run:
        run.write({"step": 1, **numbers})
        (first,) = (tmp_path / "tensorboard").iterdir()
        with (
            room(first.stat().st_size + 100),
            pytest.raises(RunError, match=rf"^cannot write TensorBoard's events in {tmp_path}/tensorboard: File too"),
        ):
            run.write({"step": 2, **numbers})
        run.write({"step": 3, **numbers})
    assert metrics_file.read(tmp_path)["step"] == [1, 2, 3]
    (second,) = set((tmp_path / "tensorboard").iterdir()) - {first}
    assert events(tmp_path, [second]) == {(3, tag, 1.0) for tag in TAGS.values()}


def test_a_resume_drops_what_came_after_the_checkpoint_and_keeps_the_rest_bitwise(tmp_path):
    write(tmp_path, [10, 20])
    kept = text(tmp_path)
    write(tmp_path, [30, 40], first_step=20)
    whole = text(tmp_path)
    with Records(tmp_path, first_step=20) as run:
        assert text(tmp_path) == kept
        assert run.elapsed_before == 2.0
    write(tmp_path, [30, 40], first_step=20)
    assert text(tmp_path) == whole


@pytest.mark.parametrize("torn", ["30,1.", "30,1.5,,,,,,,,3.0", "3"])
def test_a_line_that_was_being_written_when_the_run_was_killed_is_dropped(tmp_path, torn):
    write(tmp_path, [10, 20])
    whole = text(tmp_path)
    (tmp_path / "metrics.csv").write_text(whole + torn)
    assert metrics_file.read(tmp_path)["step"] == [10, 20]
    with Records(tmp_path, first_step=40):
        assert text(tmp_path) == whole


def test_a_new_run_starts_a_new_file_and_new_curves(tmp_path):
    write(tmp_path, [10, 20])
    write(tmp_path, [10], first_step=0)
    assert metrics_file.read(tmp_path)["step"] == [10]
    assert [event for event in events(tmp_path) if event[0] == 20] == []


def test_a_resume_without_the_file_starts_one(tmp_path):
    write(tmp_path, [30], first_step=20)
    assert metrics_file.read(tmp_path)["step"] == [30]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,loss\n1,2.0\n", "other columns"),
        ("", "other columns"),
        (HEADER + "1,2.0\n", "line 2"),
        (HEADER + "1,,,,,,,,,,,\nx,,,,,,,,,,,\n", "line 3"),
    ],
)
def test_a_damaged_file_is_named_and_left_alone(tmp_path, content, message):
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(RunError, match=message) as error, Records(tmp_path, first_step=1):
        pass
    assert str(path) in str(error.value)
    assert path.read_text() == content
    with pytest.raises(RunError, match=message):
        metrics_file.read(tmp_path)


def test_reading_what_is_no_run(tmp_path):
    with pytest.raises(RunError, match=r"no metrics\.csv"):
        metrics_file.read(tmp_path)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([3.0, None, 2.0, 2.0, 2.5], (3, 2.0)), ([math.nan, 5.0], (2, 5.0)), ([None, math.nan], None), ([], None)],
)
def test_best_validation_is_the_earliest_lowest_number(losses, best):
    series = {"step": list(range(1, len(losses) + 1)), "val_loss": losses}
    assert metrics_file.best_validation(series) == best


def test_tensorboard_gets_every_number_at_the_runs_own_steps(tmp_path):
    numbers = {key: float(place) for place, key in enumerate(TAGS, start=1)}
    with Records(tmp_path) as run:
        run.write({"step": 7, **numbers, "elapsed_s": 1.0})
    write(tmp_path, [9], first_step=7)
    found = events(tmp_path)
    assert found == {(7, TAGS[key], number) for key, number in numbers.items()} | {(9, "train/loss", np.float32(4 / 9))}
    assert set(TAGS) == set(COLUMNS) - {"step", "elapsed_s"}


def events(out, files=None):
    tf = import_tensorflow()
    files = sorted(map(str, files or (out / "tensorboard").iterdir()))
    parsed = [tf.compat.v1.Event.FromString(raw.numpy()) for raw in tf.data.TFRecordDataset(files)]
    found = [(event.step, value) for event in parsed for value in event.summary.value]
    assert {value.metadata.plugin_data.plugin_name for _, value in found} <= {"scalars"}
    return {(step, value.tag, float(tf.make_ndarray(value.tensor))) for step, value in found}


def test_reading_and_drawing_do_not_load_tensorflow():
    modules = "shardformer.logs.metrics_file, shardformer.logs.curves, shardformer.logs.progress"
    check = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0
