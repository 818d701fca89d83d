"""`explain`: a short tour of the methods of splitting a model, computed on this machine."""

import math
import textwrap

from shardformer import storage
from shardformer.analysis import explain
from shardformer.analysis.explain import Routes, Stop
from shardformer.cli.analysis_options import ExplainOptions
from shardformer.cli.arguments import say
from shardformer.config import parsing
from shardformer.layout import mesh
from shardformer.tables import format_bytes, format_table


def run_explain(arguments: list[str]) -> int:
    """Prints every stop of the tour; returns 1 if one differs from the dense result."""
    options = parsing.parse_options(arguments, ExplainOptions)
    mesh.use_cpu_devices(explain.DEVICES)
    passes = True
    for stop in explain.tour():
        say(format_stop(stop))
        passes &= all(row.passes for row in stop.differences)
        if options.pictures:
            from shardformer.analysis import pictures

            folder = storage.on_disk(options.pictures, "pictures")
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / f"{stop.title.replace(' ', '_')}.png"
            pictures.draw_split(stop.config, stop.title, path)
            say(f"drawn in {path}\n")
            if stop.config.parallel.cp > 1:
                pictures.draw_ring_steps(stop.config.parallel.cp, path.with_stem(f"{path.stem}_ring"))
                say(f"drawn in {path.with_stem(f'{path.stem}_ring')}\n")
            if stop.routes:
                pictures.draw_routes(stop.routes, path.with_stem(f"{path.stem}_routes"))
                say(f"drawn in {path.with_stem(f'{path.stem}_routes')}\n")
    return 0 if passes else 1


def format_stop(stop: Stop) -> str:
    """Formats the memory, the collectives and the worst difference of one method to split a model."""
    config = stop.config
    zero = f", zero={config.parallel.zero}" if config.parallel.zero else ""
    stored = [[kind, format_bytes(count)] for kind, count in stop.stored.list_kinds()]
    sent = [
        [operation, axis, tensors, format_bytes(count)] for (operation, axis), (tensors, count) in stop.sent.items()
    ]
    # NaN counts as the largest difference; max() would skip it.
    worst = max(stop.differences, key=lambda row: math.inf if math.isnan(row.relative) else row.relative)
    title = f"{stop.title} (mesh {config.parallel.mesh}{zero})"
    return "\n\n".join([
        f"{title}\n{'=' * len(title)}\n{textwrap.fill(stop.explanation, 100, break_on_hyphens=False)}",
        format_table(stored, ["on one device", "bytes"]),
        format_table(sent, ["collective", "over", "tensors", "bytes sent by one device"]) if sent else "no collective",
        *([format_routes(stop.routes, config.parallel.devices)] if stop.routes else []),
        f"equal to dense: the worst of the loss and {len(stop.differences) - 1} gradients is off by "
        f"{worst.relative:.0e} ({worst.name})\n",
    ])  # fmt: skip


def format_routes(routes: Routes, devices: int) -> str:
    """Formats each layer's most chosen expert, and the share of the tokens' choices that each device computes."""
    rows = []
    for i, (layer, share_E) in enumerate(zip(routes.layers, routes.share_LE, strict=True)):
        of_devices = [f"{100 * routes.share_of_device(device)[i]:.1f}%" for device in range(devices)]
        rows.append([layer, int(share_E.argmax()), f"{100 * share_E.max():.1f}%", *of_devices])
    return format_table(rows, ["layer", "busiest expert", "its share", *(f"device {d}" for d in range(devices))])
