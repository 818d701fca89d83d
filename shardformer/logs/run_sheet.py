"""`plot`: two or more runs on one sheet, drawn from their metrics.csv."""

import os
import warnings
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine
from matplotlib.ticker import FuncFormatter, MaxNLocator

from shardformer.checkpoint import read_config
from shardformer.errors import UsageError
from shardformer.files import replacing
from shardformer.logs.curves import compute_running_mean, select_drawable
from shardformer.logs.metrics_file import Series, find_best_validation, find_last_step, read_metrics
from shardformer.tables import escape, format_count

# Okabe and Ito's colours are distinct for colour-blind people; the line styles are distinct in grey as well.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
_STYLES = ("-", "--", "-.", ":")
_PANELS = {
    "loss": ("Training loss", "nats per token"),
    "val_loss": ("Validation loss", "nats per token"),
    "grad_norm": ("Gradient norm", "global L2 norm"),
    "lr": ("Learning rate", "per step"),
    "tokens_per_s": ("Speed", "tokens/s"),
}
X_AXES = {"step": "step", "tokens": "tokens trained on", "time": "minutes of training"}
_SMOOTHED_SHARE = 0.04  # of a run: the width of the running mean's window


def draw_runs(folders: list[Path], by: str, path: Path) -> Path:
    """Draws the runs by step, tokens or time into a picture and returns its path."""
    if by not in X_AXES:
        raise UsageError(f"by is one of {', '.join(X_AXES)}; got {by!r}")
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(13, 8.5), dpi=100, layout=layout, facecolor="white")
    axes = figure.subplot_mosaic("LLLVVV;GGRRSS", height_ratios=[1.6, 1])
    panels = {key: axes[letter] for key, letter in zip(_PANELS, "LVGRS", strict=True)}
    for number, (folder, name) in enumerate(zip(folders, _name_runs(folders), strict=True)):
        series = read_metrics(folder)
        series["x"] = _compute_x(folder, series, by)
        best = find_best_validation(series)
        label = f"{name}: {format_count(find_last_step(series), 'step')}"
        label += f", best {best[1]:.4f}" if best else ""
        style = choose_style(number, len(folders))
        for key, panel in panels.items():
            _draw_series(panel, key, series, label, style)
    for key, panel in panels.items():
        _format_panel(panel, key, X_AXES[by])
    lines, labels = panels["loss"].get_legend_handles_labels()
    legend = figure.legend(lines, labels, loc="outside lower center", ncols=min(len(labels), 2) or 1, frameon=False)
    for text in legend.get_texts():
        text.set_parse_math(False)  # a $ in a name does not begin a formula
    with replacing(path) as temporary, warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Glyph ")  # of a character of a name, which it prints as it is
        figure.savefig(temporary)
    return path


def choose_style(number: int, runs: int) -> dict[str, str]:
    """Returns the colour and line style of a run; the styles differ first while there are enough colours."""
    styles_used = number if runs <= len(_COLOURS) else number // len(_COLOURS)
    return {"color": _COLOURS[number % len(_COLOURS)], "linestyle": _STYLES[styles_used % len(_STYLES)]}


def _name_runs(folders: list[Path]) -> list[str]:
    """Returns the names of the folders, after the parent's name where two are equal."""
    paths = [folder.resolve() for folder in folders]
    names = [path.name for path in paths]
    unclear = [f"{path.parent.name}/{path.name}" if names.count(path.name) > 1 else path.name for path in paths]
    # matplotlib leaves labels that begin with _ out of a legend.
    labels = [f"./{name}" if name.startswith("_") else name for name in unclear]
    return [escape(os.fsencode(name).decode(errors="replace")) for name in labels]


def _compute_x(folder: Path, series: Series, by: str) -> list[float | None]:
    if by == "step":
        return series["step"]
    if by == "time":
        return [None if seconds is None else seconds / 60 for seconds in series["elapsed_s"]]
    config = read_config(folder)
    return [None if step is None else step * config.training.batch * config.model.seq for step in series["step"]]


def _draw_series(panel: Axes, key: str, series: dict, label: str, style: dict) -> None:
    x, y = select_drawable(series["x"], series[key])
    half = int(len(y) * _SMOOTHED_SHARE / 2) if key in ("loss", "grad_norm", "tokens_per_s") else 0
    if half:
        panel.plot(x, y, color=style["color"], linewidth=0.6, alpha=0.25)
        x, y = x[half:-half], compute_running_mean(y, half)
    few = key == "val_loss" or len(y) < 5
    panel.plot(x, y, label=label, linewidth=1.8, marker="o" if few else "", markersize=4, **style)


def _format_panel(panel: Axes, key: str, xlabel: str) -> None:
    title, unit = _PANELS[key]
    panel.set(title=title, ylabel=unit, xlabel=xlabel, xlim=(0, None))
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)
    integer = xlabel != X_AXES["time"]  # steps and tokens have no fractions
    panel.xaxis.set_major_locator(MaxNLocator(6 if key in ("loss", "val_loss") else 4, integer=integer))
    panel.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _shorten_number(value)))
    values = [value for line in panel.lines for value in np.asarray(line.get_ydata())]
    if not values:
        panel.set(xticks=[], yticks=[])
        panel.text(0.5, 0.5, "no values", color="#5c6670", ha="center", transform=panel.transAxes)
    elif key in ("grad_norm", "lr", "tokens_per_s"):
        panel.set_ylim(0, None)
        if key == "tokens_per_s":
            panel.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        else:
            panel.ticklabel_format(axis="y", style="sci", scilimits=(-2, 3))
    elif key == "loss":
        _crop_first_losses(panel, np.array(values))


def _crop_first_losses(panel: Axes, values: np.ndarray) -> None:
    """Lets the first losses leave the panel if they are so high that the later curve would be flat.

    The lowest loss of every run stays in it: a short run next to a long one has few of the values.
    """
    lowest = [losses.min() for line in panel.lines if len(losses := np.asarray(line.get_ydata()))]
    high, low = max(np.quantile(values, 0.98), *lowest), values.min()
    if values.max() - low > 2 * (high - low) > 0:
        panel.set_ylim(low - 0.05 * (high - low), high + 0.1 * (high - low))


def _shorten_number(value: float) -> str:
    for size, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:,g}" if abs(value) < 1e5 else f"{value / 1e3:,g}k"
