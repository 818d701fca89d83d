"""Parameters by patterns of their full names ('transformer/layers/q'), in masked trees too."""

import difflib
import fnmatch
import re
from collections.abc import Callable

from jax import tree_util


def full_name(path) -> str:
    return tree_util.keystr(path, simple=True, separator="/")


def full_names(tree) -> list[str]:
    return [full_name(path) for path, _ in tree_util.tree_leaves_with_path(tree)]


def map_names(function: Callable[[str], object], tree):
    """The tree of `function(name)` for every leaf."""
    return tree_util.tree_map_with_path(lambda path, _: function(full_name(path)), tree)


def matches(pattern: str, name: str) -> bool:
    """Whether the pattern's components ('embed', 'layers/up', '*_bias') are some that follow one another in a name."""
    wanted, components = pattern.strip("/").split("/"), name.split("/")
    starts = range(len(components) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, components[start:], wanted)) for start in starts)


def closest(pattern: str, names: list[str]) -> list[str]:
    """Up to three, by their likeness to the pattern as a whole or in one word."""
    alike = lambda text: difflib.SequenceMatcher(None, pattern, text).ratio()
    return sorted(names, key=lambda name: -max(map(alike, [name, *re.split("[/_]", name)])))[:3]
