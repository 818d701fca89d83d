"""A serial loop: the body on one slice of an axis after the other."""

import jax
import jax.numpy as jnp


def map_in_slices(body, length: int, in_positions: list[int | None], out_positions: list[int | None]):
    """Maps `body`, which returns lists of arrays, over `length` slices.

    in_positions: the position that is sliced, for each argument (None: seen whole in every iteration).
    out_positions: the position that the slices of the results make up, for each list (None: the same result in every
    iteration).
    """

    def looped(*leaves):
        sliced = [None if p is None else _slice(leaf, p, length) for leaf, p in zip(leaves, in_positions, strict=True)]

        def iteration(_, slices):
            return None, body(*[leaf if s is None else s for leaf, s in zip(leaves, slices, strict=True)])

        _, by_list = jax.lax.scan(iteration, None, sliced, length=length)
        return [
            [leaf[0] if p is None else _join(leaf, p) for leaf in results]
            for results, p in zip(by_list, out_positions, strict=True)
        ]

    return looped


def _slice(x, position: int, length: int):
    shape = jnp.shape(x)
    x = jnp.reshape(x, (*shape[:position], length, shape[position] // length, *shape[position + 1 :]))
    return jnp.moveaxis(x, position, 0)


def _join(x, position: int):
    x = jnp.moveaxis(x, 0, position)
    return jnp.reshape(x, (*x.shape[:position], x.shape[position] * x.shape[position + 1], *x.shape[position + 2 :]))
