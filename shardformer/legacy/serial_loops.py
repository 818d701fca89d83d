"""What a serial loop does: the body on one slice of an axis after the other."""

import jax
import jax.numpy as jnp


def in_turns(body, length: int, taken: list[int | None], given: list[int | None]):
    """Maps `body`, which returns lists of arrays, over `length` slices.

    taken: the position that is cut into slices, for each argument (None: seen whole in every turn).
    given: the position that the slices of the results make up, for each list (None: the same result in every turn).
    """

    def turns(*leaves):
        cut = [None if p is None else _cut(leaf, p, length) for leaf, p in zip(leaves, taken, strict=True)]

        def turn(_, slices):
            return None, body(*[leaf if s is None else s for leaf, s in zip(leaves, slices, strict=True)])

        _, by_list = jax.lax.scan(turn, None, cut, length=length)
        return [
            [leaf[0] if p is None else _joined(leaf, p) for leaf in results]
            for results, p in zip(by_list, given, strict=True)
        ]

    return turns


def _cut(x, position: int, length: int):
    shape = jnp.shape(x)
    x = jnp.reshape(x, (*shape[:position], length, shape[position] // length, *shape[position + 1 :]))
    return jnp.moveaxis(x, position, 0)


def _joined(x, position: int):
    x = jnp.moveaxis(x, 0, position)
    return jnp.reshape(x, (*x.shape[:position], -1, *x.shape[position + 2 :]))
