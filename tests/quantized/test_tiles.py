"""Products with a matrix of codes, a tile at a time; `test_quantized` has their results."""

import jax
import numpy as np

from shardformer import exact
from shardformer.quantized import code_products
from tests import asserts


def test_fold_batches_multiplies_all_examples_at_once():
    rows = []

    @code_products.fold_batches
    def multiply(x, w):
        rows.append(len(x))
        return x @ w

    x, w = np.random.RandomState(2).normal(size=(2, 3, 4, 5)), np.random.RandomState(3).normal(size=(3, 5, 6))
    nested = exact.run(jax.vmap(jax.vmap(multiply, (0, None)), (0, None)), x, w[0]).outputs
    assert asserts.relative(nested, x @ w[0]) < 1e-15
    assert 24 in rows
    rows.clear()
    assert asserts.relative(exact.run(jax.vmap(multiply), x[0], w).outputs, x[0] @ w) < 1e-15
    assert max(rows) == 4
