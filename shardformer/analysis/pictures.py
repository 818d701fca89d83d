"""The pictures of memory, sweeps, splits and ring attention; importing this module does not import matplotlib."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from shardformer.analysis import memory
from shardformer.analysis.coordinates import Movement
from shardformer.analysis.explain import Routes
from shardformer.analysis.live import Measured
from shardformer.analysis.plan import Plan
from shardformer.config import Config
from shardformer.errors import RunError

# Okabe and Ito's colours, which colour-blind readers can tell apart.
BLUE, ORANGE, GREEN, YELLOW, SKY, RED, PINK = (
    "#0072B2", "#E69F00", "#009E73", "#F0E442", "#56B4E9", "#D55E00", "#CC79A7",
)  # fmt: skip
KINDS = {"parameters": BLUE, "gradients": ORANGE, "optimizer": GREEN, "average": PINK, "activations": SKY}
BINDING = {
    "compute": "#444444",
    "memory": YELLOW,
    "overlapped wire": PINK,
    "exposed wire": RED,
}  # other colours than those of memory
MOST_BARS = 30
UNITS = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1, "B"))


@contextlib.contextmanager
def figure(path: str | Path, width: float, height: float) -> Iterator:
    """Yields a figure, which is saved at the end of the block."""
    import matplotlib.figure

    drawn = matplotlib.figure.Figure(figsize=(width, height), layout="constrained")
    yield drawn
    try:
        drawn.savefig(os.path.expanduser(path), dpi=120)
    except (OSError, ValueError) as error:
        raise RunError(f"cannot draw {path}: {error}") from None


def draw_memory(m: Measured, path: str | Path) -> None:
    """Draws three bars: predicted, compiled and live bytes."""
    stored = m.predicted
    names = {"parameters": "params", "optimizer": "optimizer", "average": "average"}
    live = {kind: max(m.live[name].values(), default=0) for kind, name in names.items()}
    predicted = stored._asdict() | {"activations": m.temporaries}
    unit, name = _unit(stored.total + m.temporaries)
    with figure(path, 9, 3.2) as drawn:
        axes = drawn.add_subplot()
        compiled = {"state (compiled)": m.compiled_state, "temporary (compiled)": m.compiled_temporaries}
        for row, parts in (("predicted", predicted), ("compiled", compiled), ("live after a step", live)):
            left = 0.0
            for kind, colour in (KINDS | {"state (compiled)": "#666666", "temporary (compiled)": "#BBBBBB"}).items():
                if size := parts.get(kind, 0):
                    axes.barh(row, size / unit, left=left, color=colour, edgecolor="white", label=kind)
                    left += size / unit
        axes.set_xlabel(f"{name} on one device")
        axes.set_title(f"mesh {m.config.parallel.mesh} ({m.config.parallel.mesh_axes}), zero={m.config.parallel.zero}")
        axes.invert_yaxis()
        handles = dict(zip(*reversed(axes.get_legend_handles_labels()), strict=True))
        axes.legend(handles.values(), handles.keys(), loc="upper left", bbox_to_anchor=(1, 1), frameon=False)


def draw_movements(panels: dict[str, list[Movement]], path: str | Path) -> None:
    """Draws the change of the logits by size, a line for each step; flat lines are rates that carry over."""
    with figure(path, 5 * len(panels), 4) as drawn:
        for panel, (name, movements) in zip(
            drawn.subplots(1, len(panels), squeeze=False)[0], panels.items(), strict=True
        ):
            sizes = [m.size for m in movements]
            for step, changes in enumerate(zip(*(m.changes for m in movements), strict=True), 1):
                panel.plot(sizes, changes, marker="o", label=f"step {step}")
            panel.set(xscale="log", xlabel=name, ylabel="change of the logits, root mean square")
            panel.set_xticks(sizes, [str(size) for size in sizes])
            panel.minorticks_off()
            panel.set_ylim(bottom=0)
            panel.legend(frameon=False, fontsize=8)


def draw_sweep(plans: list[Plan], path: str | Path) -> None:
    """Draws the memory of each setting next to a chip's, and the time of its step; of a long list only the first."""
    fastest = plans[:MOST_BARS]
    memory_of_one, largest = plans[0].chips.chip.memory, max(p.stored.total + p.temporaries for p in fastest)
    is_small = largest < memory_of_one / 20  # next to the chip's memory the bars would be invisible
    unit, name = _unit(largest if is_small else memory_of_one)
    limit = memory_of_one / unit
    with figure(path, 12, 1.8 + 0.3 * len(fastest)) as drawn:
        by_memory, by_time = drawn.subplots(1, 2, sharey=True, width_ratios=(3, 2))
        labels = [label_setting(p.config) for p in fastest]
        left = [0.0] * len(fastest)
        for kind, colour in KINDS.items():
            sizes = [(p.stored._asdict() | {"activations": p.temporaries})[kind] / unit for p in fastest]
            if any(sizes):
                by_memory.barh(labels, sizes, left=left, color=colour, label=kind, edgecolor="white")
                left = [a + b for a, b in zip(left, sizes, strict=True)]
        if not is_small:
            by_memory.axvline(limit, color="black", linestyle="--", label=f"memory of one {plans[0].chips.name}")
        most = min(max(left) * 1.05, 3 * limit)
        by_memory.set_xlim(0, most if is_small else max(most, 1.1 * limit))
        for row, size in enumerate(left):
            if size > by_memory.get_xlim()[1]:  # the bar leaves the picture
                by_memory.text(by_memory.get_xlim()[1] * 0.99, row, f"{size:,.0f} {name}", ha="right", va="center",
                               fontsize=8, bbox={"facecolor": "white", "edgecolor": "none", "pad": 1})  # fmt: skip
        whole = f", of {memory.format_bytes(memory_of_one)}" if is_small else ""
        by_memory.set_xlabel(f"{name} on one device, estimated{whole}")
        by_memory.margins(y=0.01)
        by_memory.invert_yaxis()
        drawn.legend(*by_memory.get_legend_handles_labels(), loc="outside lower center", ncols=6, frameon=False)
        longest = max(p.times.seconds for p in fastest)
        scale, part = (1e3, "ms") if longest >= 1e-4 else (1e6, "µs")
        for binding, colour in BINDING.items():
            rows = [(label, scale * p.times.seconds) for label, p in zip(labels, fastest, strict=True)
                    if p.times.binding == binding]  # fmt: skip
            if rows:
                by_time.barh(*zip(*rows, strict=True), color=colour, edgecolor="white", label=f"{binding} binds")
        by_time.set_xlabel(f"{part} a step at best")
        by_time.locator_params(axis="x", nbins=5)
        by_time.legend(loc="upper left", bbox_to_anchor=(1, 1), frameon=False)
        rest = f" (the first {len(fastest)} of {len(plans)} settings)" if len(fastest) < len(plans) else ""
        drawn.suptitle(f"{plans[0].chips}, batch {plans[0].config.training.batch}: what fits, the fastest first{rest}")


def label_setting(config: Config) -> str:
    """Returns the label of one row of a sweep; bars with equal labels would overlap."""
    return f"{config.parallel.mesh} zero={config.parallel.zero}" + (
        "" if config.parallel.remat == "none" else f" remat={config.parallel.remat}"
    )


def draw_split(config: Config, title: str, path: str | Path) -> None:
    """Draws each device's slices of the batch and of the layers' matrices."""
    from matplotlib.patches import Rectangle

    model_specs, shapes = memory.split_of_layer(config)
    devices = config.parallel.devices
    colours = (BLUE, ORANGE, GREEN, PINK)
    names = list(shapes)
    with figure(path, 1.6 * len(names) + 0.6, 1.5 * devices + 0.9) as drawn:
        axes = drawn.subplots(devices, len(names), squeeze=False)
        for device in range(devices):
            for column, name in enumerate(names):
                ax, (layers, rows, columns) = axes[device][column], shapes[name]
                (first, last), (top, bottom), (left, right) = model_specs[name][device]
                parts = memory.tokens_of_device(config, device) if name == "batch" else [(left, right)]
                for layer in range(layers):
                    above = layer * rows * 1.1
                    ax.add_patch(Rectangle((0, above), columns, rows, facecolor="#EEEEEE", edgecolor="#888888"))
                    if first <= layer < last:
                        for left, right in parts:
                            part = (left, above + top), right - left, bottom - top
                            ax.add_patch(Rectangle(*part, facecolor=colours[device % 4], edgecolor="black"))
                ax.set_xlim(-1, columns + 1)
                ax.set_ylim(rows * (1.1 * layers - 0.1) + 1, -1)
                ax.set_aspect("equal", "box")
                ax.set_xticks([])
                ax.set_yticks([])
                for side in ax.spines.values():
                    side.set_visible(False)
                if device == 0:
                    of = "experts" if name.startswith("expert") else "layers"
                    each = f"{layers} {of}, each " if layers > 1 else ""
                    ax.set_title(f"{name}\n{each}{rows} x {columns}", fontsize=9)
            axes[device][0].set_ylabel(f"device {device}", fontsize=9)
        zero = f", zero={config.parallel.zero}" if config.parallel.zero else ""
        heading = (
            f"{title}: mesh {config.parallel.mesh} ({config.parallel.mesh_axes}){zero}; each matrix has a separate "
            "scale"
        )
        drawn.suptitle(heading, fontsize=11)


def draw_routes(routes: Routes, path: str | Path) -> None:
    """Draws each expert's share of the tokens' choices in each layer, coloured by the device that has the expert."""
    from matplotlib.patches import Patch

    layers, experts = routes.count_LE.shape
    devices = sorted({device for owners in routes.devices_E for device in owners})
    colours = {device: COLOURS[place % len(COLOURS)] for place, device in enumerate(devices)}
    by_expert = [colours[owners[0]] if len(owners) == 1 else "#666666" for owners in routes.devices_E]
    with figure(path, 4.5 + 0.4 * experts, 1.2 + 1.5 * layers) as drawn:
        for ax, layer, share_E in zip(
            drawn.subplots(layers, sharex=True, sharey=True, squeeze=False)[:, 0],
            routes.layers,
            routes.share_LE,
            strict=True,
        ):
            ax.bar(range(experts), 100 * share_E, color=by_expert, edgecolor="white")
            ax.axhline(100 / experts, color="black", linestyle="--", linewidth=1)
            ax.set_ylabel(f"layer {layer}: %")
        ax.set_xlabel("expert")
        ax.set_xticks(range(experts))
        shares = {device: 100 * routes.share_of_device(device).mean() for device in devices}
        handles = [Patch(color=colours[device], label=f"device {device}: {shares[device]:.1f}%") for device in devices]
        if all(len(owners) == 1 for owners in routes.devices_E):
            drawn.legend(handles=handles, loc="outside right upper", frameon=False, title="mean of the layers")
        drawn.suptitle("share of the tokens' choices; dashed: equal shares", fontsize=11)


def _unit(size: float) -> tuple[float, str]:
    return next((unit, name) for unit, name in UNITS if size >= unit or unit == 1)


COLOURS = (BLUE, ORANGE, GREEN, PINK)


def turns_of_chunks(cp: int) -> dict[tuple[int, int], tuple[int, int]]:
    """Returns {(chunk of queries, chunk of keys): (shard, ring step)} of the pairs that a causal mask leaves."""
    holder = {chunk: min(chunk, 2 * cp - 1 - chunk) for chunk in range(2 * cp)}
    return {
        (row, column): (holder[row], (holder[row] - holder[column]) % cp)
        for row in range(2 * cp)
        for column in range(row + 1)
    }


def draw_ring_steps(cp: int, path: str | Path) -> None:
    """Draws the pairs of chunks, coloured by shard and numbered by ring step."""
    from matplotlib.patches import Rectangle

    with figure(path, 1.0 + 0.6 * 2 * cp, 1.2 + 0.6 * 2 * cp) as drawn:
        ax = drawn.subplots()
        for (row, column), (shard, ring_step) in turns_of_chunks(cp).items():
            colour = COLOURS[shard % len(COLOURS)]
            ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white"))
            ax.text(column + 0.5, row + 0.5, f"{shard}:{ring_step}", ha="center", va="center", fontsize=9,
                    color="white" if colour == BLUE else "black")  # fmt: skip
        ax.set_xlim(0, 2 * cp)
        ax.set_ylim(2 * cp, 0)
        ax.set_aspect("equal")
        ax.set_xlabel("chunk of keys")
        ax.set_ylabel("chunk of queries")
        ticks = [chunk + 0.5 for chunk in range(2 * cp)]
        ax.set_xticks(ticks, range(2 * cp))
        ax.set_yticks(ticks, range(2 * cp))
        drawn.suptitle(f"shard:ring step of each pair, cp={cp}", fontsize=11)
