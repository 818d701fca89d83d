"""Patterns of full parameter names ('transformer/layers/q'), also in masked trees."""

import difflib
import fnmatch
import re
from collections.abc import Callable

from jax import tree_util


def full_name(path) -> str:
    """Returns the name of a leaf at a path of jax.tree_util."""
    return tree_util.keystr(path, simple=True, separator="/")


def full_names(tree) -> list[str]:
    """Returns the names of all leaves."""
    return [full_name(path) for path, _ in tree_util.tree_leaves_with_path(tree)]


def map_names(function: Callable[[str], object], tree):
    """Returns the tree with `function(name)` in place of every leaf."""
    return tree_util.tree_map_with_path(lambda path, _: function(full_name(path)), tree)


def matches(pattern: str, name: str) -> bool:
    """Returns whether the pattern ('embed', 'layers/up', '*_bias') matches consecutive components of a name."""
    wanted, components = pattern.strip("/").split("/"), name.split("/")
    starts = range(len(components) - len(wanted) + 1)
    return any(all(map(fnmatch.fnmatchcase, components[start:], wanted)) for start in starts)


def closest(pattern: str, names: list[str]) -> list[str]:
    """Returns up to three names that are like the pattern, as a whole or in one word."""

    def unlikeness(name: str) -> float:
        return -max(difflib.SequenceMatcher(None, pattern, text).ratio() for text in (name, *re.split("[/_]", name)))

    return sorted(names, key=unlikeness)[:3]
