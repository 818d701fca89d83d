"""The sheet of two or more runs, drawn from any metrics.csv that a run can leave."""

import math

import matplotlib.image
import pytest
from matplotlib.figure import Figure

from shardformer import preset
from shardformer.__main__ import main
from shardformer.errors import UsageError
from shardformer.logs import run_sheet
from shardformer.logs.metrics_file import COLUMNS, MAX_POINTS, open_metrics_file
from tests.surroundings import before_call


def make_run(folder, steps, **changes):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(preset("tiny").replace(vocab=65, mesh="1x1", **changes).to_json())
    file = open_metrics_file(folder)
    file.begin(0)
    for step in steps:
        file.append({"step": step, "loss": 4 / step, "val_loss": 5 / step if step % 10 == 0 else None, "lr": 1e-3,
                     "grad_norm": 0.5, "tokens_per_s": 1e4, "elapsed_s": 6.0 * step})  # fmt: skip
    return folder


@pytest.fixture
def figure(monkeypatch):
    saved = []
    before_call(monkeypatch, Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return lambda: saved[-1]


@pytest.mark.parametrize(("by", "last"), [("step", 40), ("tokens", 40 * 8 * 16), ("time", 4.0)])
@pytest.mark.filterwarnings("error")
def test_runs_share_a_sheet(tmp_path, figure, by, last):
    folders = [make_run(tmp_path / name / "run", range(1, 41)) for name in ("$x_{$", "b")]
    path = run_sheet.draw_runs(folders, by, tmp_path / "runs.png")
    assert matplotlib.image.imread(path)[..., :3].std() > 0.01
    loss, validation, *_ = figure().axes
    labels = ["$x_{$/run: 40 steps, best 0.1250", "b/run: 40 steps, best 0.1250"]
    assert [line.get_label() for line in validation.lines] == labels
    assert len({line.get_color() for line in validation.lines}) == 2
    assert len({line.get_linestyle() for line in validation.lines}) == 2
    assert max(validation.lines[0].get_xdata()) == last
    assert loss.get_xlabel() == run_sheet.X_AXES[by]


def test_short_run_with_a_high_loss_stays_in_the_sheet(tmp_path, figure):
    folders = [make_run(tmp_path / "long", range(4, 400)), make_run(tmp_path / "short", [1, 2])]
    run_sheet.draw_runs(folders, "step", tmp_path / "runs.png")
    assert figure().axes[0].get_ylim()[1] > 2  # the lowest loss of the short run


@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(tmp_path, figure):
    folders = [
        make_run(tmp_path / "empty", []),
        make_run(tmp_path / "one", [1]),
        make_run(tmp_path / "many", range(1, 9)),
    ]
    run_sheet.draw_runs(folders, "step", tmp_path / "runs.png")
    assert all(tick == int(tick) for axes in figure().axes for tick in axes.get_xticks())
    open_metrics_file(folders[2]).append({"step": 9, "loss": math.nan, "val_loss": math.inf, "grad_norm": 1e308})
    run_sheet.draw_runs(folders, "time", tmp_path / "runs.png")
    assert (tmp_path / "runs.png").exists()


def test_the_command(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "lr=0.1", range(1, 12))
    assert main(["plot", "lr=0.1", "by=time", "out=sheet.png"]) == 0
    assert capsys.readouterr().out == "wrote sheet.png\n"
    with pytest.raises(UsageError, match="by is one of step, tokens, time; got 'hours'"):
        run_sheet.draw_runs([], "hours", tmp_path / "runs.png")
    assert main(["plot"]) == 2
    for out in ("", "/"):
        assert main(["plot", "lr=0.1", f"out={out}"]) == 2
        assert f"out takes the name of a picture, such as runs.png; got {out!r}" in capsys.readouterr().err


@pytest.mark.slow
def test_a_picture_is_of_the_kind_that_its_name_says(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    make_run(tmp_path / "run", [1])
    assert main(["plot", "run", "out=runs.pdf"]) == 0
    assert (tmp_path / "runs.pdf").read_bytes().startswith(b"%PDF")
    assert main(["plot", "run", "out=runs.xyz"]) == 2
    assert "ends in .png" in capsys.readouterr().err


def test_a_name_that_begins_with_an_underscore_is_in_the_legend(tmp_path, figure):
    run_sheet.draw_runs([make_run(tmp_path / "_a", [1])], "step", tmp_path / "runs.png")
    (legend,) = figure().legends
    assert [text.get_text() for text in legend.get_texts()] == ["./_a: 1 step"]


def test_control_characters_of_names_are_escaped(tmp_path, figure, recwarn):
    run_sheet.draw_runs([make_run(tmp_path / "a\x07\x1b[2J", [1, 2])], "step", tmp_path / "runs.png")
    label = figure().axes[0].lines[0].get_label()
    assert label.startswith(r"a\x07\x1b[2J: 2 steps")
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


@pytest.mark.slow
def test_long_run_is_drawn_in_time(tmp_path, figure):
    """A running mean over 3% of a million rows would take minutes."""
    folder = make_run(tmp_path / "long", [1])
    empty = "," * (len(COLUMNS) - 2)
    with (folder / "metrics.csv").open("a") as file:
        file.writelines(f"{step},{2.0 + step % 7}{empty}\n" for step in range(2, 60_001))
    run_sheet.draw_runs([folder], "step", tmp_path / "runs.png")
    [thin, mean] = figure().axes[0].lines
    assert 10_000 < len(thin.get_xdata()) <= MAX_POINTS + 1
    assert mean.get_label().startswith("long: 60,000 steps")
