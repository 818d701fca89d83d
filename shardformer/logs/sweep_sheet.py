"""The picture of a sweep: the validation loss of each run by step, and of each combination by its values."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.layout_engine import ConstrainedLayoutEngine

from shardformer.files import replacing
from shardformer.logs.curves import select_drawable
from shardformer.logs.metrics_file import read_metrics
from shardformer.logs.run_sheet import choose_style


class Drawn(NamedTuple):
    """One combination of values."""

    label: str
    values: dict[str, str]  # by swept key, as the command line takes them
    loss: float  # the mean of its seeds
    folders: list[Path]


def draw_sweep_sheet(combinations: list[Drawn], path: Path) -> Path:
    """Draws combinations, of which those that come first are best, and returns the path."""
    layout = ConstrainedLayoutEngine(w_pad=0.1, h_pad=0.1)
    figure = Figure(figsize=(13, 6), dpi=100, layout=layout, facecolor="white")
    by_step, by_value = figure.subplots(1, 2)
    for number, combination in enumerate(combinations):
        style = choose_style(number, len(combinations))
        for seed, folder in enumerate(combination.folders):
            series = read_metrics(folder)
            x, y = select_drawable(series["step"], series["val_loss"])
            by_step.plot(x, y, label="" if seed else combination.label, linewidth=1.5, **style)
    by_step.set(title="Validation loss of each run", xlabel="step", ylabel="nats per token")
    key = next(iter(combinations[0].values), "")
    ticks = _in_order(combination.values.get(key, "") for combination in combinations)
    others = _in_order(_name_others(combination, key) for combination in combinations)
    for number, other in enumerate(others):
        of_line = {c.values.get(key, ""): c.loss for c in combinations if _name_others(c, key) == other}
        points = [(at, of_line[tick]) for at, tick in enumerate(ticks) if tick in of_line]
        by_value.plot(*zip(*points, strict=True), label=other, marker="o", **choose_style(number, len(others)))
    by_value.set(title="The mean of the seeds where a combination ended", xlabel=key, xticks=range(len(ticks)))
    by_value.set_xticklabels(ticks)
    if others != [""]:
        by_value.legend(frameon=False)
    for panel in (by_step, by_value):
        panel.grid(alpha=0.25)
        panel.spines[["top", "right"]].set_visible(False)
    figure.legend(*by_step.get_legend_handles_labels(), loc="outside lower center", ncols=3, frameon=False)
    with replacing(path) as temporary:
        figure.savefig(temporary)
    return path


def _name_others(combination: Drawn, key: str) -> str:
    return " ".join(f"{name}={value}" for name, value in combination.values.items() if name != key)


def _in_order(values: Iterable[str]) -> list[str]:
    """Returns different values, numbers by size and before words."""

    def rank(value: str) -> tuple:
        try:
            return 0, float(value), value
        except ValueError:
            return 1, 0.0, value

    return sorted({*values}, key=rank)
