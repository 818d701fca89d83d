"""Each leaf of a pytree by its path: 'optimizer/1/0/mu/transformer/embed/tokens'."""

import jax


def flatten(tree) -> dict:
    """Name -> leaf, in the tree's own order."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves are named {name!r}: rename a key that holds a '/' or differs only in type")
        named[name] = leaf
    return named


def unflatten(like, named: dict):
    """The tree of `like` with the leaves of `named`."""
    wanted = flatten(like)
    if wanted.keys() != named.keys():
        raise ValueError(f"only one side has {sorted(wanted.keys() ^ named.keys())}")
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in wanted])
