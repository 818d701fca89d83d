"""Draws layer.png: one parallel layer on a 2x2 mesh, the slice of each device, and the collectives."""

from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import FancyArrowPatch, FancyBboxPatch, Rectangle

ROWS_OF_DP = ("#009E73", "#CC79A7")  # Okabe and Ito's colours, distinct for colour-blind readers
SLICES_OF_MP = ("#0072B2", "#E69F00")
WHOLE, EMPTY, INK = "#8c8c8c", "#f2f2f2", "#222222"
WIDTH, HEIGHT = 7.0, 3.2  # of one device's box
LEFT, BOTTOM = (0.0, 8.0), (4.4, 0.0)  # positions of the boxes by mp and by dp


def draw_layer(path: Path) -> None:
    """Draws the picture into `path`."""
    figure = Figure(figsize=(13, 7.2), dpi=110, facecolor="white")
    axes = figure.add_axes((0.01, 0.01, 0.98, 0.98))
    axes.set(xlim=(-1.9, 15.3), ylim=(-1.25, 8.55))
    axes.set_axis_off()
    for dp in range(2):
        for mp in range(2):
            _draw_device(axes, dp, mp)
        _draw_all_reduce(axes, BOTTOM[dp])
    for mp in range(2):
        _draw_gradient_mean(axes, LEFT[mp] + 0.35 * WIDTH)
        axes.text(
            LEFT[mp] + WIDTH / 2, 8.1, f"mp = {mp}", ha="center", fontsize=13, color=SLICES_OF_MP[mp], weight="bold"
        )
    for dp in range(2):
        middle = BOTTOM[dp] + HEIGHT / 2
        axes.text(
            -1.0, middle, f"dp = {dp}", ha="center", va="center", fontsize=13, color=ROWS_OF_DP[dp], weight="bold"
        )
    _draw_legend(axes)
    figure.savefig(path)


def _draw_device(axes: Axes, dp: int, mp: int) -> None:
    x, y = LEFT[mp], BOTTOM[dp]
    box = FancyBboxPatch((x, y), WIDTH, HEIGHT, boxstyle="round,pad=0.12", fc="white", ec="#bbbbbb", lw=1.2)
    axes.add_patch(box)
    axes.text(x + 0.02, y + HEIGHT - 0.08, f"device {2 * dp + mp}", va="top", fontsize=10, color="#666666")
    middle = y + HEIGHT / 2 - 0.1
    rows, columns = ROWS_OF_DP[dp], SLICES_OF_MP[mp]
    _draw_block(axes, x + 0.15, middle, 0.55, 1.3, rows, "x", "[B/2, T, D]")
    _draw_block(axes, x + 1.3, middle, 0.3, 1.3, WHOLE, "norm", "[D]")
    _draw_slice(axes, x + 2.15, middle, 1.35, 1.0, mp, columns, True, "q k v up", "[D, F/2]")
    _draw_block(axes, x + 4.0, middle, 0.5, 1.3, columns, "hidden", "[.., F/2]")
    _draw_slice(axes, x + 5.0, middle, 1.0, 1.35, mp, columns, False, "o down", "[F/2, D]")
    for start, stop in ((0.7, 1.3), (1.6, 2.15), (3.5, 4.0), (4.5, 5.0), (6.0, 6.25)):
        _draw_arrow(axes, (x + start, middle), (x + stop, middle))


def _draw_block(axes: Axes, x: float, middle: float, width: float, height: float, color: str, name: str, shape: str):
    axes.add_patch(Rectangle((x, middle - height / 2), width, height, fc=color, ec=INK, lw=0.8))
    _name(axes, x + width / 2, middle, height, name, shape)


def _draw_slice(axes: Axes, x, middle, width, height, mp: int, color: str, by_columns: bool, name: str, shape: str):
    """Draws the outline of the full matrix, with the slice of this device filled."""
    y = middle - height / 2
    axes.add_patch(Rectangle((x, y), width, height, fc=EMPTY, ec=INK, lw=0.8, ls=":"))
    if by_columns:
        part = Rectangle((x + mp * width / 2, y), width / 2, height, fc=color, ec=INK, lw=0.8)
    else:
        part = Rectangle((x, y + (1 - mp) * height / 2), width, height / 2, fc=color, ec=INK, lw=0.8)
    axes.add_patch(part)
    _name(axes, x + width / 2, middle, height, name, shape)


def _name(axes: Axes, x: float, middle: float, height: float, name: str, shape: str) -> None:
    axes.text(x, middle + height / 2 + 0.08, name, ha="center", va="bottom", fontsize=10, color=INK)
    axes.text(
        x, middle - height / 2 - 0.1, shape, ha="center", va="top", fontsize=8.5, color="#555555", family="monospace"
    )


def _draw_arrow(axes: Axes, start, stop, style: str = "-|>", width: float = 1.0, color: str = INK) -> None:
    axes.add_patch(
        FancyArrowPatch(start, stop, arrowstyle=style, mutation_scale=12, lw=width, color=color, shrinkA=1, shrinkB=1)
    )


def _draw_all_reduce(axes: Axes, bottom: float) -> None:
    """The sum of the partial products over mp, from the end of one device's row to the other's."""
    y = bottom + HEIGHT / 2 - 0.1
    left, right = LEFT[0] + 6.05, LEFT[1] + 6.05
    for x in (left, right):
        axes.text(x + 0.32, y, "+", ha="center", va="center", fontsize=20, color="#D55E00", weight="bold")
    low = bottom + 0.12
    for x in (left + 0.32, right + 0.32):
        _draw_arrow(axes, (x, low), (x, y - 0.2), "-|>", 2.2, "#D55E00")
    axes.plot([left + 0.32, right + 0.32], [low, low], color="#D55E00", lw=2.2, solid_capstyle="round")
    axes.text(
        LEFT[1] + 2.4,
        low + 0.06,
        "psum over mp: the one all-reduce",
        fontsize=9.5,
        color="#D55E00",
        va="bottom",
        ha="center",
    )


def _draw_gradient_mean(axes: Axes, x: float) -> None:
    _draw_arrow(axes, (x, BOTTOM[1] + HEIGHT + 0.1), (x, BOTTOM[0] - 0.1), "<|-|>", 2.0, "#56B4E9")
    middle = (BOTTOM[1] + HEIGHT + BOTTOM[0]) / 2
    axes.text(x + 0.15, middle, "gradients: one mean over dp a step", va="center", fontsize=9.5, color="#2b7fb0")


def _draw_legend(axes: Axes) -> None:
    entries = (
        (0.1, ROWS_OF_DP[0], "this dp's rows of the batch"),
        (3.9, SLICES_OF_MP[0], "this mp's slice of each matrix"),
        (7.9, WHOLE, "one copy, the same on every device"),
        (12.4, EMPTY, "held by the other mp"),
    )
    for x, color, words in entries:
        axes.add_patch(Rectangle((x, -0.95), 0.35, 0.3, fc=color, ec=INK, lw=0.8))
        axes.text(x + 0.48, -0.8, words, va="center", fontsize=10.5, color=INK)


if __name__ == "__main__":
    draw_layer(Path(__file__).with_name("layer.png"))
