"""`curves.png`: the loss, gradient norm, learning rate and speed of a run, drawn from its metrics.csv.

Other objectives have other small panels, and a run with experts has one more, from its experts.csv.
"""

import os
import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, FuncFormatter, MaxNLocator

from shardformer.files import replacing
from shardformer.logs import metrics_file
from shardformer.tables import escape, format_count

_TRAIN, _VALIDATION, _GREY = "#3b6fb6", "#d1622b", "#5c6670"
_SMALL_PANELS = (
    ("grad_norm", "Gradient norm", "global L2 norm"),
    ("lr", "Learning rate", "per step"),
    ("tokens_per_s", "Speed", "tokens/s"),
)
_PAIR_PANELS = (
    ("reward_margin", "Reward margin", "chosen minus rejected"),
    ("accuracy", "Right order", "share of pairs"),
    ("chosen_reward", "Reward of chosen", "beta nats, or a score"),
)
_REWARD_PANELS = (
    ("reward", "Reward", "mean of the answers"),
    ("kl", "KL divergence", "nats per token"),
    ("clip_share", "Clipped tokens", "share"),
)
_TEACHER_PANELS = (("kl", "KL divergence", "nats per token"), *_SMALL_PANELS[:2])
_EXPERT_PANEL = (metrics_file.LARGEST_SHARE, "Busiest expert", "share of routed tokens")
_THOUSANDS = FuncFormatter(lambda value, _: f"{value:,.0f}")
_SMOOTHED_SHARE = 0.03  # of the run: the width of the running mean's window
_SPEEDS_AVERAGED = 9  # rows, at least: those before an evaluation are read at once, so each seems to take no time
# Shares of the figure. A layout engine would measure them by drawing twice.
_MARGINS = {"left": 0.07, "right": 0.97, "bottom": 0.075, "top": 0.9, "wspace": 0.36, "hspace": 0.32}
_LARGEST_DRAWN = 1e30  # matplotlib overflows on larger values


def draw_curves(out: Path, unit: str = "tokens") -> Path:
    """Draws OUT/curves.png and returns its path; `unit` is what the run's speed counts."""
    out = Path(out)
    series = metrics_file.read_metrics(out)
    # A Figure without pyplot needs no display, has no global state and needs no closing.
    figure = Figure(figsize=(12, 8), dpi=100, facecolor="white")
    last_step = metrics_file.find_last_step(series)
    name = escape(os.fsencode(out.resolve().name).decode(errors="replace"))  # the name may hold any bytes
    title = figure.suptitle(f"{name}: {format_count(last_step, 'step')}", fontsize=15, fontweight="bold")
    title.set_parse_math(False)  # a $ in the name does not begin a formula
    panels = [
        (key, heading, f"{unit}/s" if key == "tokens_per_s" else label, series)
        for key, heading, label in _choose_panels(series)
    ]
    if shares := metrics_file.read_largest_shares(out):
        panels.append((*_EXPERT_PANEL, shares))
    rows = [["loss"] * len(panels), [key for key, *_ in panels]]
    axes = figure.subplot_mosaic(rows, height_ratios=[2.4, 1], gridspec_kw=_MARGINS)
    _draw_loss(axes["loss"], series, _choose_loss_label(series, unit))
    for key, heading, unit, source in panels:
        points = select_drawable(source["step"], source[key])
        _draw_small(axes[key], *(_average_speed(*points) if key == "tokens_per_s" else points), heading, unit)
    for key, panel in axes.items():
        _format_axes(panel, last_step, ticks=10 if key == "loss" else 5)
    path = out / "curves.png"
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # of a character of the name, which it prints as it is
        figure.savefig(temporary)
    return path


def _choose_panels(series: dict) -> tuple:
    if "reward_margin" in series:
        return _PAIR_PANELS
    if "reward" in series:
        return _REWARD_PANELS
    return _TEACHER_PANELS if "kl" in series else _SMALL_PANELS


def _choose_loss_label(series: dict, unit: str) -> str:
    if unit != "tokens":
        return "loss"
    if "reward_margin" in series:
        return "loss of a pair"
    return "loss of the policy" if "reward" in series else "loss (nats per token)"


def compute_running_mean(values: np.ndarray, half: int) -> np.ndarray:
    """Averages each value with `half` neighbours on each side, so that the mean does not lag.

    The first and last `half` values have no mean, as they lack neighbours.
    """
    width = 2 * half + 1
    return np.convolve(values, np.full(width, 1 / width), "valid")


def _average_speed(steps: np.ndarray, speeds: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns the speed over neighbouring rows: their tokens in the sum of their times."""
    half = max(int(len(speeds) * _SMOOTHED_SHARE), _SPEEDS_AVERAGED) // 2
    is_measured = speeds > 0
    steps, speeds = steps[is_measured], speeds[is_measured]
    if len(speeds) <= 2 * half:
        return steps, speeds
    return steps[half:-half], 1 / compute_running_mean(1 / speeds, half)


def _draw_loss(panel: Axes, series: dict, label_of_loss: str) -> None:
    steps, losses = select_drawable(series["step"], series["loss"])
    half = int(len(losses) * _SMOOTHED_SHARE / 2)
    if half:
        panel.plot(steps, losses, color=_TRAIN, linewidth=0.7, alpha=0.4, label="training, as logged")
        mean = compute_running_mean(losses, half)
        panel.plot(steps[half:-half], mean, color=_TRAIN, linewidth=2, label="training, running mean")
    elif len(losses):
        panel.plot(steps, losses, color=_TRAIN, linewidth=2, marker=_choose_marker(steps), label="training")
    steps, losses = select_drawable(series["step"], series["val_loss"])
    best = metrics_file.find_best_validation(series)
    if len(losses) and best:
        step, loss = best
        panel.plot(steps, losses, color=_VALIDATION, linewidth=2, marker="o", markersize=4, label="validation")
        # The label is in the legend, because text next to the star would cover a curve.
        label = f"best validation: {loss:.4f} at step {step:,}"
        panel.plot(step, loss, "*", color=_VALIDATION, markersize=18, markeredgecolor="white", zorder=3, label=label)
    panel.set(title="Loss", ylabel=label_of_loss)
    if panel.lines:
        panel.legend(loc="upper right", frameon=False, fontsize=11)


def _draw_small(panel: Axes, steps: np.ndarray, values: np.ndarray, title: str, unit: str) -> None:
    panel.set(title=title, ylabel=unit)
    if not len(values):
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no value yet", color=_GREY, ha="center", transform=panel.transAxes)
        return
    panel.plot(steps, values, color=_GREY, linewidth=1.1, marker=_choose_marker(steps))
    panel.set_ylim(min(0, 1.1 * values.min()), 1.1 * max(values.max(), 0) or 1)
    if values.max() >= 1000:
        panel.yaxis.set_major_formatter(EngFormatter(sep=""))  # 20k: short, as the margins are fixed
    else:
        panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))


def _format_axes(panel: Axes, last_step: int, ticks: int) -> None:
    panel.set(xlabel="step", xlim=(0, max(last_step, 1) * 1.02))
    panel.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=True))
    panel.xaxis.set_major_formatter(_THOUSANDS)
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def select_drawable(xs: list, ys: list) -> tuple[np.ndarray, np.ndarray]:
    """Returns the points with both values present and small enough for an axis."""
    pairs = [(x, y) for x, y in zip(xs, ys, strict=True) if _is_drawable(x) and _is_drawable(y)]
    x, y = np.array(pairs, float).reshape(-1, 2).T
    return x, y


def _is_drawable(value: float | None) -> bool:
    return value is not None and abs(value) <= _LARGEST_DRAWN  # False for NaN


def _choose_marker(steps: np.ndarray) -> str:
    return "o" if len(steps) < 5 else ""
