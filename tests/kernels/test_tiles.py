"""Products with a matrix of codes, a tile at a time; `test_quantized` has their results."""

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.kernels import tiles


def test_fold_batches_multiplies_all_examples_at_once():
    rows = []

    @tiles.fold_batches
    def multiply(x, w):
        rows.append(len(x))
        return x @ w

    x, w = np.random.RandomState(2).normal(size=(2, 3, 4, 5)), np.random.RandomState(3).normal(size=(3, 5, 6))
    x, w = jnp.asarray(x, jnp.float32), jnp.asarray(w, jnp.float32)
    nested = jax.vmap(jax.vmap(multiply, (0, None)), (0, None))(x, w[0])
    np.testing.assert_allclose(nested, x @ w[0], rtol=1e-5)
    assert 24 in rows
    rows.clear()
    np.testing.assert_allclose(jax.vmap(multiply)(x[0], w), x[0] @ w, rtol=1e-5)
    assert max(rows) == 4
