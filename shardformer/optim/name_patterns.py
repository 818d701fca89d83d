"""Trees by their leaves' full names ('transformer/layers/q'), masked ones too: optax leaves holes where it masks."""

import difflib
import fnmatch
import re
from collections.abc import Callable

from jax import tree_util


def of(path) -> str:
    return tree_util.keystr(path, simple=True, separator="/")


def tree_map(function: Callable[[str], object], tree):
    """The tree of `function(name)` for every leaf."""
    return tree_util.tree_map_with_path(lambda path, _: function(of(path)), tree)


def matches(pattern: str, name: str) -> bool:
    """A word is found anywhere in a name; a pattern with * ? [ is one of the whole name."""
    if any(character in pattern for character in "*?["):
        return fnmatch.fnmatchcase(name, pattern)
    return pattern in name


def closest(pattern: str, every: list[str]) -> list[str]:
    """Up to three, by their likeness to the pattern as a whole or in one word."""
    alike = lambda text: difflib.SequenceMatcher(None, pattern, text).ratio()
    return sorted(every, key=lambda name: -max(map(alike, [name, *re.split("[/_]", name)])))[:3]
