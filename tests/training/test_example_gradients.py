"""gradients.csv: appended row by row, continued by a resume, and rejected if damaged."""

import pytest

from shardformer.errors import RunError
from shardformer.training.example_gradients import GradientsFile

NOISE = {1: (4.0, 1.0), 2: (2.0, 3.0), 3: (6.0, 4.0), 4: (9.0, 1.0)}
HEADER = "step,noise_variance,noise_signal,noise_scale\n"
ROWS = ["1,4.0,1.0,4.0\n", "2,2.0,3.0,1.5\n", "3,6.0,4.0,1.5\n", "4,9.0,1.0,2.3333333333333335\n"]


def write(gradients, *steps):
    for step in steps:
        variance, signal = NOISE[step]
        gradients.write(step, {"noise_variance": variance, "noise_signal": signal})


def text(out):
    return (out / "gradients.csv").read_text()


def test_noise_scale_is_a_ratio_of_means_over_the_run(tmp_path):
    write(GradientsFile(tmp_path / "gradients.csv", 0), 1, 2, 3, 4)
    assert text(tmp_path) == HEADER + "".join(ROWS)


def test_gradients_resume_drops_later_rows_and_keeps_sums(tmp_path):
    write(GradientsFile(tmp_path / "gradients.csv", 0), 1, 2, 3, 4)
    write(GradientsFile(tmp_path / "gradients.csv", 2), 3)
    assert text(tmp_path) == HEADER + "".join(ROWS[:3])
    write(GradientsFile(tmp_path / "gradients.csv", 0), 1)
    assert text(tmp_path) == HEADER + ROWS[0]


def test_gradients_row_is_appended(tmp_path):
    gradients = GradientsFile(tmp_path / "gradients.csv", 0)
    write(gradients, 1)
    (tmp_path / "gradients.csv").write_text("kept\n")
    write(gradients, 2)
    assert text(tmp_path) == "kept\n" + ROWS[1]


def test_negative_noise_estimate_has_no_scale(tmp_path):
    GradientsFile(tmp_path / "gradients.csv", 0).write(1, {"noise_variance": 2.0, "noise_signal": -1.0})
    assert text(tmp_path) == HEADER + "1,2.0,-1.0,\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("nonsense\n", r"gradients\.csv has unknown columns: .* move it away"),
        (HEADER + "1,x,1.0,\n", r"gradients\.csv, line 2, is not a row of gradients: '1,x,1\.0,'; remove that line"),
        (b"\xff\xfe", r"gradients\.csv is damaged: .* move it away"),
    ],
)
def test_damaged_gradients_file_is_rejected_and_unchanged(tmp_path, content, message):
    path, content = tmp_path / "gradients.csv", content if isinstance(content, bytes) else content.encode()
    path.write_bytes(content)
    gradients = GradientsFile(tmp_path / "gradients.csv", 1)  # opening reads nothing
    for _ in range(2):
        with pytest.raises(RunError, match=message):
            write(gradients, 2)
    assert path.read_bytes() == content
