"""`curves.png`: how a run went, drawn from its metrics.csv alone."""

from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shardformer.files import replacing
from shardformer.logs import metrics_file

_TRAIN, _VALIDATION, _GREY = "#3b6fb6", "#d1622b", "#5c6670"
_SMALL_PANELS = (
    ("grad_norm", "Gradient norm", "global L2 norm"),
    ("lr", "Learning rate", "per step"),
    ("tokens_per_s", "Speed", "tokens/s"),
)
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_SMOOTHED_SHARE = 0.03  # of the run: the width of the window of the running mean


def draw(out: Path) -> Path:
    """Draws OUT/curves.png and returns its path."""
    out = Path(out)
    series = metrics_file.read(out)
    # A Figure of its own, not pyplot's: no display, no global state, nothing to close.
    figure = Figure(figsize=(12, 8), dpi=100, layout="constrained", facecolor="white")
    figure.get_layout_engine().set(w_pad=0.12, h_pad=0.1)
    last_step = max(series["step"], default=0)
    figure.suptitle(f"{out.resolve().name}: {last_step:,} steps", fontsize=15, fontweight="bold")
    axes = figure.subplot_mosaic([["loss"] * 3, [key for key, *_ in _SMALL_PANELS]], height_ratios=[2.4, 1])
    _draw_loss(axes["loss"], series)
    for key, title, unit in _SMALL_PANELS:
        _draw_small(axes[key], *_known(series, key), title, unit)
    for key, panel in axes.items():
        _dress(panel, last_step, ticks=10 if key == "loss" else 5)
    path = out / "curves.png"
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def smoothed(values: np.ndarray, half: int) -> np.ndarray:
    """The mean over `half` values to each side, for every value that has them: centred, so it does not lag."""
    width = 2 * half + 1
    return np.convolve(values, np.full(width, 1 / width), "valid")


def _draw_loss(panel: Axes, series: dict) -> None:
    steps, losses = _known(series, "loss")
    half = int(len(losses) * _SMOOTHED_SHARE / 2)
    if half:
        panel.plot(steps, losses, color=_TRAIN, linewidth=0.7, alpha=0.4, label="training, as logged")
        panel.plot(steps[half:-half], smoothed(losses, half), color=_TRAIN, linewidth=2, label="training, running mean")
    elif len(losses):
        panel.plot(steps, losses, color=_TRAIN, linewidth=2, marker=_marker(steps), label="training")
    steps, losses = _known(series, "val_loss")
    if len(losses):
        step, loss = metrics_file.best_validation(series)
        panel.plot(steps, losses, color=_VALIDATION, linewidth=2, marker="o", markersize=4, label="validation")
        # The legend holds the words: beside the star they would cover a curve in one run or another.
        label = f"best validation: {loss:.4f} at step {step:,}"
        panel.plot(step, loss, "*", color=_VALIDATION, markersize=18, markeredgecolor="white", zorder=3, label=label)
    panel.set(title="Loss", ylabel="loss (nats per token)")
    if panel.lines:
        panel.legend(loc="upper right", frameon=False, fontsize=11)


def _draw_small(panel: Axes, steps: np.ndarray, values: np.ndarray, title: str, unit: str) -> None:
    panel.set(title=title, ylabel=unit)
    if not len(values):
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no value yet", color=_GREY, ha="center", transform=panel.transAxes)
        return
    panel.plot(steps, values, color=_GREY, linewidth=1.1, marker=_marker(steps))
    panel.set_ylim(0, 1.1 * values.max() or 1)
    if values.max() >= 1000:
        panel.yaxis.set_major_formatter(_THOUSANDS)
    else:
        panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _dress(panel: Axes, last_step: int, ticks: int) -> None:
    panel.set(xlabel="step", xlim=(0, max(last_step, 1) * 1.02))
    panel.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=True))
    panel.xaxis.set_major_formatter(_THOUSANDS)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def _known(series: dict, key: str) -> tuple[np.ndarray, np.ndarray]:
    """Steps and values where there is a finite number."""
    pairs = [
        (step, value)
        for step, value in zip(series["step"], series[key], strict=True)
        if value is not None and np.isfinite(value)
    ]
    steps, values = np.array(pairs, float).reshape(-1, 2).T
    return steps, values


def _marker(steps: np.ndarray) -> str:
    return "o" if len(steps) < 5 else ""
