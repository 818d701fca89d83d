"""`all_to_all` and `pswapaxes` for vmap's axes, until jax's own are right there.

vmap takes a value (or a cotangent) that all instances share for one of twice its rank, and cannot transpose an untiled
exchange that moves an axis. So every instance gets a factor of 1 of its own, and untiled ones send axis 0 to axis 0.
"""

import jax
import jax.numpy as jnp

_exchange = jax.lax.all_to_all


def all_to_all(x, axis_name, split_axis: int, concat_axis: int, *, axis_index_groups=None, tiled: bool = False):
    def exchanged(leaf):
        if tiled:
            return ones(_exchange(ones(leaf), axis_name, split_axis, concat_axis, **how))
        sent = ones(_exchange(ones(jnp.moveaxis(leaf, split_axis, 0)), axis_name, 0, 0, **how))
        return jnp.moveaxis(sent, 0, concat_axis)

    def ones(leaf):
        return leaf * (1 + 0 * jax.lax.axis_index(axis_name)).astype(leaf.dtype)

    how = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    return jax.tree.map(lambda leaf: exchanged(jnp.asarray(leaf)), x)


def pswapaxes(x, axis_name, axis: int, *, axis_index_groups=None):
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def keeps_shared_shapes(exchange) -> bool:
    """Whether a jax's `all_to_all` keeps the shape of a value that all instances share."""
    share = jax.vmap(lambda _, x: exchange(x, "i", 0, 0), (0, None), axis_name="i")
    return jax.eval_shape(share, jnp.zeros(2), jnp.zeros(2)).shape == (2, 2)
