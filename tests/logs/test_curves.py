"""The picture of a run, from any metrics.csv that a run can leave."""

import itertools
import math
import os
import subprocess
import sys

import matplotlib.image
import numpy as np
import pytest
from matplotlib.figure import Figure

from shardformer.errors import RunError
from shardformer.logs import curves
from shardformer.logs.metrics_file import COLUMNS
from tests.launch import ROOT
from tests.surroundings import before_call


def run_with(out, rows):
    columns = *COLUMNS, *(key for row in rows[:1] for key in row if key not in COLUMNS)
    lines = [",".join("" if row.get(key) is None else repr(row[key]) for key in columns) for row in rows]
    (out / "metrics.csv").write_text("\n".join([",".join(columns), *lines, ""]))
    return out


def row(step, **more):
    return {"step": step, "loss": 4.0 / step, "grad_norm": 0.5, "lr": 1e-3, "tokens_per_s": 1e4, **more}


@pytest.fixture
def figure(monkeypatch):
    """The figure that was saved last."""
    saved = []
    before_call(monkeypatch, Figure, "savefig", lambda figure, *_, **__: saved.append(figure))
    return lambda: saved[-1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "rows",
    [
        [],
        [row(1)],
        [row(1, val_loss=3.0)],
        [row(1, tokens_per_s=None, grad_norm=None, lr=None)],
        [row(step) for step in range(1, 200)],
        [row(1, lr=0.0), row(2, loss=math.nan, val_loss=math.inf, grad_norm=math.inf)],
        [row(1), row(2, loss=1e308, val_loss=-1e308, lr=1e300, tokens_per_s=1e308), row(2**63 - 1)],
    ],
    ids=["empty", "one row", "one evaluated row", "loss alone", "no validation", "not finite", "huge"],
)
@pytest.mark.filterwarnings("error")
def test_any_run_can_be_drawn(tmp_path, rows):
    path = curves.draw_curves(run_with(tmp_path, rows))
    picture = matplotlib.image.imread(path)
    assert picture.shape[:2] == (800, 1200)
    assert picture[..., :3].std() > 0.01
    assert sorted(file.name for file in tmp_path.iterdir()) == ["curves.png", "metrics.csv"]


@pytest.mark.parametrize("name", ["x_{$", "$a$ \\frac", b"caf\xe9".decode("utf-8", "surrogateescape")])
def test_any_folder_name_can_be_a_title(tmp_path, figure, name):
    (tmp_path / name).mkdir()
    curves.draw_curves(run_with(tmp_path / name, [row(1)]))
    assert (tmp_path / name / "curves.png").exists()
    title = figure()._suptitle.get_text()
    assert title == f"{name.encode(errors='surrogateescape').decode(errors='replace')}: 1 step"


def test_control_characters_of_a_folder_name_are_escaped(tmp_path, figure, recwarn):
    """matplotlib's warning about a glyph printed them, and every run's name that its font lacks."""
    for name, title in (("a\x1b[2J", "a\\x1b[2J: 1 step"), ("\u6c49", "\u6c49: 1 step")):
        (tmp_path / name).mkdir()
        curves.draw_curves(run_with(tmp_path / name, [row(1)]))
        assert figure()._suptitle.get_text() == title
    assert not [warning for warning in recwarn if "Glyph" in str(warning.message)]


def test_the_best_validation_is_marked_with_number_and_step(tmp_path, figure):
    validation = {50: 2.5, 100: 1.875, 150: 2.25}
    curves.draw_curves(run_with(tmp_path, [row(step, val_loss=validation.get(step)) for step in range(10, 201, 10)]))
    lines = {line.get_label(): line for line in figure().axes[0].lines}
    star = lines["best validation: 1.8750 at step 100"]
    assert (list(star.get_xdata()), list(star.get_ydata())) == ([100], [1.875])
    assert dict(zip(*lines["validation"].get_data(), strict=True)) == validation


def test_the_loss_axis_names_its_unit(tmp_path, figure):
    curves.draw_curves(run_with(tmp_path, [row(1)]))
    assert figure().axes[0].get_ylabel() == "loss (nats per token)"
    assert {panel.get_xlabel() for panel in figure().axes} == {"step"}


def test_curves_of_a_task_count_rows(tmp_path, figure):
    curves.draw_curves(run_with(tmp_path, [row(1)]), "rows")
    labels = [panel.get_ylabel() for panel in figure().axes]
    assert (labels[0], labels[-1]) == ("loss", "rows/s")


def test_loss_of_pairs_is_not_called_nats_per_token(tmp_path, figure):
    curves.draw_curves(run_with(tmp_path, [row(1, reward_margin=0.1, accuracy=1.0, chosen_reward=0.1)]))
    assert figure().axes[0].get_ylabel() == "loss of a pair"


def test_single_fast_step_does_not_flatten_the_speed(tmp_path, figure):
    curves.draw_curves(run_with(tmp_path, [row(n, tokens_per_s=1e6 if n == 9 else 1e4) for n in range(1, 20)]))
    speed = next(panel for panel in figure().axes if panel.get_ylabel() == "tokens/s")
    assert 1e4 < speed.get_ylim()[1] < 1e5


def test_drawn_speed_is_tokens_over_time(tmp_path, figure):
    """Of each ten steps of 1,000 tokens in 0.1 s, three are read at once, after the time of all four has passed."""
    speeds = [1000 / (0.397 if n % 10 == 0 else 0.001 if n % 10 < 4 else 0.1) for n in range(300)]
    curves.draw_curves(run_with(tmp_path, [row(n + 1, tokens_per_s=speed) for n, speed in enumerate(speeds)]))
    speed = next(panel for panel in figure().axes if panel.get_ylabel() == "tokens/s")
    drawn = speed.lines[0].get_ydata()
    assert abs(np.median(drawn) / 10_000 - 1) < 0.12
    assert 7_000 < drawn.min() < drawn.max() < 16_000


def test_load_of_experts_has_a_panel(tmp_path, figure):
    """The largest share of any layer; a run without experts has no such panel."""
    out = run_with(tmp_path, [row(1), row(2)])
    curves.draw_curves(out)
    assert len(figure().axes) == 4
    load = "step,largest_share_layer_0,entropy_layer_0,largest_share_layer_1\n1,0.25,0.9,0.5\n2,0.75,0.9,0.125\n"
    (out / "experts.csv").write_text(load)
    curves.draw_curves(out)
    panel = next(panel for panel in figure().axes if panel.get_title() == "Busiest expert")
    assert [list(values) for values in panel.lines[0].get_data()] == [[1, 2], [0.5, 0.75]]


def find_collisions(figure) -> list[str]:
    """Returns the panels whose labels cover another panel and its labels, or cross the edge of the figure."""
    labels = {
        (panel.get_title(), name): axis.get_tightbbox()
        for panel in figure.axes
        for name, axis in (("x", panel.xaxis), ("y", panel.yaxis))
    }
    areas = labels | {(panel.get_title(), "area"): panel.get_window_extent() for panel in figure.axes}
    pairs = ((a, b) for a, b in itertools.product(labels, areas) if a[0] != b[0])
    covering = {a[0] for a, b in pairs if labels[a].overlaps(areas[b])}
    return [*covering, *(a for (a, _), box in labels.items() if box.x0 < 0 or box.x1 > figure.bbox.width)]


def draw_long_labels(out, figure, keys=()):
    more = dict.fromkeys(keys, -1234.5)
    rows = [row(step, grad_norm=345_678.0, tokens_per_s=1.2e8, **more) for step in (1, 1_000_000)]
    curves.draw_curves(run_with(out, rows))
    return find_collisions(figure())


KEYS_OF_PANELS = {
    "plain": (),
    "pairs": ("reward_margin", "accuracy", "chosen_reward"),
    "rewards": ("reward", "kl", "clip_share"),
    "teacher": ("kl",),
}


@pytest.mark.parametrize("experts", [False, True])
@pytest.mark.parametrize("keys", KEYS_OF_PANELS.values(), ids=KEYS_OF_PANELS)
def test_labels_of_large_numbers_do_not_collide(tmp_path, figure, keys, experts):
    """With experts, the row has a fourth panel."""
    if experts:
        (tmp_path / "experts.csv").write_text("step,largest_share_layer_0\n1,0.25\n2,0.75\n")
    assert not draw_long_labels(tmp_path, figure, keys)


def test_colliding_labels_are_noticed(tmp_path, figure, monkeypatch):
    monkeypatch.setitem(curves._MARGINS, "wspace", 0.05)
    assert "Speed" in draw_long_labels(tmp_path, figure)


def test_running_mean_keeps_a_line_and_averages_noise():
    line = np.arange(50.0)
    np.testing.assert_allclose(curves.compute_running_mean(line, half=5), line[5:-5])
    noise = np.where(np.arange(50) % 2, 1.0, -1.0)
    assert abs(curves.compute_running_mean(noise, half=5)).max() < 0.1


def test_running_mean_ignores_the_lone_last_value(tmp_path, figure):
    curves.draw_curves(
        run_with(tmp_path, [row(step) | {"loss": 1.0 if step < 200 else -100.0} for step in range(1, 201)])
    )
    lines = {line.get_label(): line for line in figure().axes[0].lines}
    steps, losses = lines["training, running mean"].get_data()
    assert (steps[0], steps[-1]) == (4, 197)  # three values to each side
    np.testing.assert_allclose(losses, [1.0] * 193 + [(6 - 100) / 7])


def test_a_folder_without_metrics_is_named(tmp_path):
    with pytest.raises(RunError, match=r"no metrics\.csv"):
        curves.draw_curves(tmp_path)


@pytest.mark.slow
def test_import_without_a_home_folder_prints_nothing():
    """Containers often run under a user without one; matplotlib then uses a temporary folder."""
    environment = {name: value for name, value in os.environ.items() if name not in ("MPLCONFIGDIR", "XDG_CONFIG_HOME")}
    command = [sys.executable, "-c", "import shardformer.logs.curves"]
    ran = subprocess.run(command, env=environment | {"HOME": "/proc/none"}, cwd=ROOT, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
