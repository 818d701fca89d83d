"""Pictures, in characters, of what devices send to one another."""

from collections.abc import Mapping

from shardformer.analysis.program_collectives import Collective, total_by_kind, wire_bytes
from shardformer.tables import format_bytes


def sent_bytes(collectives: list[Collective]) -> float:
    """Returns the bytes that one device sends in one run."""
    return sum(each.times * wire_bytes(each) for each in collectives)


def draw_wire(collectives: list[Collective], sizes: Mapping[str, int]) -> str:
    """Draws the mesh once for each kind of collective, with lines between the devices that exchange."""
    mesh = " ".join(f"{axis}={size}" for axis, size in sizes.items())
    axes = tuple(sizes)
    types = total_by_kind(collectives, tuple(sizes.values()), axes)
    if not types:
        return f"mesh {mesh}: nothing crossed the wire"
    pictures = []
    for (operation, over), (tensors, sent) in types.items():
        count = f"{tensors} tensor{'s' if tensors > 1 else ''}"
        title = f"mesh {mesh}: {operation} over {over}, {count}, {format_bytes(sent)} sent by each device"
        pictures.append("\n".join([title, *draw_mesh(sizes, over.split(), operation)]))
    return "\n".join(pictures)


def draw_mesh(sizes: Mapping[str, int], over: list[str], operation: str) -> list[str]:
    """Returns lines: devices as [0], joined along the axes `over`."""
    drawn = [axis for axis, size in sizes.items() if size > 1] or list(sizes)[:1]
    if len(drawn) > 2:
        return []
    down, across = "" if len(drawn) == 1 else drawn[0], drawn[-1]
    rows, columns = sizes.get(down, 1), sizes[across]
    link = ("-->" if operation == "collective-permute" else "===") if across in over else "   "
    margin = " " * (len(down) + 4 if down else 2)
    lines = [margin + "   ".join(f"{across}{i}".center(4) for i in range(columns)).rstrip()]
    for row in range(rows):
        label = f"  {down}{row} ".ljust(len(margin)) if down else margin
        lines.append(label + link.join(f"[{row * columns + i:>2}]" for i in range(columns)))
        if down in over and row + 1 < rows:
            lines.append(margin + "   ".join(" || " for _ in range(columns)))
    return lines
