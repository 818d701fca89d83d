"""Special tokens in the text of a message, which must stay letters.

A guard behind the first character of such a token marks it through the rendering of the conversation. The tokenizer
takes the guards out, and spells a special token that had one.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

GUARD = "\ufdd0"  # a noncharacter of Unicode, for use within a program


def make_guard(special_tokens: Sequence[str]) -> Callable[[Any], Any]:
    """Returns a function that guards these tokens in all texts of a tree of lists and dictionaries."""
    if not special_tokens:
        return lambda tree: tree
    pattern = re.compile("|".join(map(re.escape, sorted(special_tokens, key=len, reverse=True))))

    def guard(tree):
        if isinstance(tree, str):
            return pattern.sub(lambda match: match[0][0] + GUARD + match[0][1:], tree)
        if isinstance(tree, list):
            return [guard(each) for each in tree]
        return {name: guard(each) for name, each in tree.items()} if isinstance(tree, dict) else tree

    return guard


def remove_guards(text: str) -> tuple[str, list[int]]:
    """Returns a text without guards, and the number of its characters before each guard."""
    parts = text.split(GUARD)
    positions, length = [], 0
    for part in parts[:-1]:
        length += len(part)
        positions.append(length)
    return "".join(parts), positions
