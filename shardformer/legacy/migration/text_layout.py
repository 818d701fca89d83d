"""Source text of nested calls and containers, broken into lines where it is too wide."""

from typing import NamedTuple

WIDTH = 100


class Group(NamedTuple):
    """Brackets around items, each a text or another group: `P(`, `"x"`, `)`."""

    opening: str
    items: tuple["Group | str", ...]
    closing: str


def lay_out(node: Group | str, indent: str, before: int = 0) -> str:
    """Returns the text; items get lines of their own if the text is wider than WIDTH.

    indent: of the statement. before: columns that precede the text on its first line, without the indent.
    """
    text = _on_one_line(node)
    if isinstance(node, str) or len(indent) + before + len(text) <= WIDTH:
        return text
    inner = indent + "    "
    lines = [f"{inner}{lay_out(item, inner)},\n" for item in node.items]
    return f"{node.opening}\n{''.join(lines)}{indent}{node.closing.lstrip(',')}"


def _on_one_line(node: Group | str) -> str:
    if isinstance(node, str):
        return node
    items = ", ".join(map(_on_one_line, node.items))
    return f"{node.opening}{items}{node.closing}"
