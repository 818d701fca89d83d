"""metrics.csv through crashes, resumes, full disks and edits by hand."""

import math
import subprocess
import sys

import numpy as np
import pytest

from shardformer.errors import RunError
from shardformer.logs import csv_file, metrics_file
from shardformer.logs.metrics_file import read_metrics
from tests.shared import room

HEADER = (
    "step,loss,val_loss,z_loss,accuracy,val_accuracy,grad_norm,update_norm,lr,tokens_per_s,elapsed_s,save_s,data_s,"
    "val_nats_per_byte,val_bits_per_byte,peak_bytes,mfu\n"
)


def begin(out, first_step=0):
    """Returns the file of a run that continues from a step, and the elapsed seconds of that run."""
    file = metrics_file.open_metrics_file(out)
    return file, metrics_file.find_elapsed_seconds(file.begin(first_step))


def write(out, steps, first_step=0, **more):
    file, _ = begin(out, first_step)
    for step in steps:
        file.append({"step": step, "loss": 4.0 / step, "elapsed_s": step / 10, **more})


def text(out):
    return (out / "metrics.csv").read_text()


def test_metrics_columns_are_stable(tmp_path):
    write(tmp_path, [])
    assert text(tmp_path) == HEADER


def test_an_absent_value_is_an_empty_cell(tmp_path):
    write(tmp_path, [1], val_loss=None, lr=0.001)
    assert text(tmp_path) == HEADER + "1,4.0,,,,,,,0.001,,0.1,,,,,,\n"


def test_float32_numbers_come_back_bitwise(tmp_path):
    values = [np.float32(1) / 3, np.float32(1e-38), np.float32(3.4e38), np.float32(np.inf), np.float32(np.nan)]
    file, _ = begin(tmp_path)
    for step, value in enumerate(values, start=1):
        file.append({"step": np.int32(step), "loss": value})
    back = np.array(read_metrics(tmp_path)["loss"], np.float32)
    assert back.tobytes() == np.array(values).tobytes()


def test_a_row_is_on_disk_before_the_next_step(tmp_path):
    begin(tmp_path)[0].append({"step": 1, "loss": 2.0})
    assert read_metrics(tmp_path)["loss"] == [2.0]


def test_row_with_unknown_keys_is_rejected(tmp_path):
    file, _ = begin(tmp_path)
    with pytest.raises(ValueError, match="unknown keys losss"):
        file.append({"step": 1, "losss": 2.0})
    with pytest.raises(ValueError, match="no step"):
        file.append({"loss": 2.0})
    assert text(tmp_path) == HEADER


def test_rows_of_a_full_disk_are_written_once_there_is_room(tmp_path):
    file, _ = begin(tmp_path)
    file.append({"step": 1, "loss": 4.0})
    with room(len(text(tmp_path)) + 5):
        for step in (2, 3):
            with pytest.raises(RunError, match=rf"^cannot write {tmp_path}/metrics\.csv: .*File too large"):
                file.append({"step": step, "loss": 4.0 / step})
            assert read_metrics(tmp_path)["step"] == [1]
    file.append({"step": 4, "loss": 1.0})
    whole = text(tmp_path)
    assert read_metrics(tmp_path)["loss"] == [4.0, 2.0, 4 / 3, 1.0]
    (tmp_path / "roomy").mkdir()
    file, _ = begin(tmp_path / "roomy")
    for step in range(1, 5):
        file.append({"step": step, "loss": 4.0 / step})
    assert text(tmp_path / "roomy") == whole


def test_resume_drops_later_rows_and_keeps_the_rest_bitwise(tmp_path):
    write(tmp_path, [10, 20])
    kept = text(tmp_path)
    write(tmp_path, [30, 40], first_step=20)
    whole = text(tmp_path)
    assert begin(tmp_path, first_step=20)[1] == 2.0
    assert text(tmp_path) == kept
    write(tmp_path, [30, 40], first_step=20)
    assert text(tmp_path) == whole


@pytest.mark.parametrize("torn", ["30,1.", "30,1.5,,,,,,,,3.0", "3"])
def test_line_torn_by_a_kill_is_dropped(tmp_path, torn):
    write(tmp_path, [10, 20])
    whole = text(tmp_path)
    (tmp_path / "metrics.csv").write_text(whole + torn)
    assert read_metrics(tmp_path)["step"] == [10, 20]
    begin(tmp_path, first_step=40)
    assert text(tmp_path) == whole


def test_a_new_run_starts_a_new_file(tmp_path):
    write(tmp_path, [10, 20])
    write(tmp_path, [10], first_step=0)
    assert read_metrics(tmp_path)["step"] == [10]


def test_a_resume_without_the_file_starts_one(tmp_path):
    write(tmp_path, [30], first_step=20)
    assert read_metrics(tmp_path)["step"] == [30]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("step,losss\n1,2.0\n", "unknown columns"),
        ("loss,step\n1,2.0\n", "unknown columns"),
        ("step,loss,loss\n1,2.0,2.0\n", "unknown columns"),
        ("", "unknown columns"),
        (HEADER + "1,2.0\n", "line 2"),
        (HEADER + "9" * 4000 + "," * 16 + "\n", "line 2"),
        (HEADER + "9" * 5000 + "," * 16 + "\n", "line 2"),
        (HEADER + "-1" + "," * 16 + "\n", "line 2"),
        (HEADER + "1" + "," * 16 + "\nx" + "," * 16 + "\n", "line 3"),
    ],
)
def test_damaged_metrics_file_is_named_and_unchanged(tmp_path, content, message):
    path = tmp_path / "metrics.csv"
    path.write_text(content)
    with pytest.raises(RunError, match=message) as error:
        begin(tmp_path, first_step=1)
    assert str(path) in str(error.value)
    assert path.read_text() == content
    with pytest.raises(RunError, match=message):
        read_metrics(tmp_path)


def test_folder_without_metrics_is_rejected(tmp_path):
    with pytest.raises(RunError, match=r"no metrics\.csv"):
        read_metrics(tmp_path)


@pytest.mark.parametrize(
    ("losses", "best"),
    [([3.0, None, 2.0, 2.0, 2.5], (3, 2.0)), ([math.nan, 5.0], (2, 5.0)), ([None, math.nan], None), ([], None)],
)
def test_best_validation_is_the_earliest_lowest_number(losses, best):
    series = {"step": list(range(1, len(losses) + 1)), "val_loss": losses}
    assert metrics_file.find_best_validation(series) == best


def test_file_of_an_older_version_gets_the_new_columns(tmp_path):
    (tmp_path / "metrics.csv").write_text("step,elapsed_s,loss\n1,0.5,4.0\n2,,3.0\n")
    write(tmp_path, [3], first_step=2)
    assert text(tmp_path) == f"{HEADER}1,4.0,,,,,,,,,0.5,,,,,,\n2,3.0,,,,,,,,,,,,,,,\n3,{4 / 3},,,,,,,,,0.3,,,,,,\n"


@pytest.mark.parametrize("seconds", ["inf", "nan", "-1", "1e308"])
def test_a_time_that_is_impossible_counts_as_none(tmp_path, seconds):
    (tmp_path / "metrics.csv").write_text(f"step,elapsed_s\n1,{seconds}\n")
    assert begin(tmp_path, first_step=1)[1] == 0.0


@pytest.mark.slow
def test_reading_and_drawing_do_not_load_tensorflow():
    modules = "shardformer.logs.metrics_file, shardformer.logs.curves, shardformer.logs.progress"
    check = f"import sys, {modules}; sys.exit('tensorflow' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", check]).returncode == 0


@pytest.mark.parametrize("lowest", ["val_loss", ""])
def test_rows_of_a_long_file_are_thinned(tmp_path, lowest):
    write(tmp_path, range(1, 1001), val_loss=3.0)
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write(",".join(["1001", "2.0", "1.5", *[""] * (len(metrics_file.COLUMNS) - 3)]) + "\n")
        file.write(",".join(["1002", "2.0", "nan", *[""] * (len(metrics_file.COLUMNS) - 3)]) + "\n")
        file.write(",".join(["1003", "2.0", *[""] * (len(metrics_file.COLUMNS) - 2)]) + "\n")
    rows = metrics_file.open_metrics_file(tmp_path).read(100, lowest)
    steps = [int(row["step"]) for row in rows]
    assert steps[:2] == [1, 12]
    assert steps[-1] == 1003
    assert len(steps) <= 101
    assert (1001 in steps) == bool(lowest)
    assert len(metrics_file.open_metrics_file(tmp_path).read()) == 1003


def test_file_of_too_many_rows_is_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(csv_file, "MAX_ROWS", 10)
    write(tmp_path, range(1, 10))
    assert len(metrics_file.read_metrics(tmp_path)["step"]) == 9
    write(tmp_path, range(1, 12))
    with pytest.raises(RunError, match="has more than 10 rows; move it away"):
        metrics_file.read_metrics(tmp_path)
