"""Names each leaf of a pytree by its path, for example 'optimizer/1/0/mu/transformer/embed/tokens'."""

import jax


def flatten(tree) -> dict:
    """Returns name -> leaf, in the order of the tree."""
    named = {}
    for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        if name in named:
            raise ValueError(f"two leaves are named {name!r}: rename a key that holds a '/' or differs only in type")
        named[name] = leaf
    return named


def unflatten(like, named: dict):
    """Returns a tree with the structure of `like` and the leaves of `named`."""
    wanted = flatten(like)
    if wanted.keys() != named.keys():
        raise ValueError(f"only one side has {sorted(wanted.keys() ^ named.keys())}")
    return jax.tree.unflatten(jax.tree.structure(like), [named[name] for name in wanted])
