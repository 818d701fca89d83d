"""`all_to_all` and `pswapaxes` for vmap's axes, where jax's are wrong.

Under vmap, jax gives the result the wrong rank if all instances share the value (or the cotangent), and it cannot
transpose an untiled exchange that moves an axis. So each value is multiplied by a 1 that varies over the axis, and an
untiled exchange goes from axis 0 to axis 0, between two moveaxis.
"""

import jax
import jax.numpy as jnp

_exchange = jax.lax.all_to_all


def all_to_all(x, axis_name, split_axis: int, concat_axis: int, *, axis_index_groups=None, tiled: bool = False):
    def exchange(leaf):
        if tiled:
            return vary(_exchange(vary(leaf), axis_name, split_axis, concat_axis, **how))
        received = vary(_exchange(vary(jnp.moveaxis(leaf, split_axis, 0)), axis_name, 0, 0, **how))
        return jnp.moveaxis(received, 0, concat_axis)

    def vary(leaf):
        return leaf * (1 + 0 * jax.lax.axis_index(axis_name)).astype(leaf.dtype)

    how = {"axis_index_groups": axis_index_groups, "tiled": tiled}
    return jax.tree.map(lambda leaf: exchange(jnp.asarray(leaf)), x)


def pswapaxes(x, axis_name, axis: int, *, axis_index_groups=None):
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups)


def keeps_shared_shapes(exchange) -> bool:
    """Returns True if an `all_to_all` gives the right shape for a value that all instances share."""
    shared = jax.vmap(lambda _, x: exchange(x, "i", 0, 0), (0, None), axis_name="i")
    pair = jax.ShapeDtypeStruct((2,), jnp.float32)  # an array would start the backend before the script sets its flags
    return jax.eval_shape(shared, pair, pair).shape == (2, 2)
