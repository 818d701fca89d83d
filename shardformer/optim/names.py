"""Trees by their leaves' full names ('transformer/layers/q'), masked ones too: optax leaves holes where it masks."""

from collections.abc import Callable

from jax import tree_util


def of(path) -> str:
    return tree_util.keystr(path, simple=True, separator="/")


def tree_map(function: Callable[[str], object], tree):
    """The tree of `function(name)` for every leaf."""
    return tree_util.tree_map_with_path(lambda path, _: function(of(path)), tree)
