"""The collectives over mp: values, exact gradients, and the mistakes that the varying-axes types catch."""

import jax
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives, exact
from shardformer.analysis import dense_reference as reference
from shardformer.analysis import verify_exact
from shardformer.layout import mesh
from shardformer.model import Model
from tests import asserts, sharded, shared

X = sharded.normal(0, 3, 8)
W = sharded.normal(1, 8, 12)
U = sharded.normal(2, 12, 8)
COLUMNS, ROWS = P(None, "mp"), P("mp", None)


def split_product(x, w, u):
    """Column-parallel, then row-parallel, as everywhere in the model."""
    return collectives.reduce(jax.numpy.tanh(collectives.fan_out(x) @ w) @ u)


def dense_product(x, w, u):
    return jax.numpy.tanh(x @ w) @ u


def square(product):
    return lambda *args: (product(*args) ** 2).sum()


def test_split_products_have_the_dense_value_and_gradient():
    specs = (P(), COLUMNS, ROWS)
    ours = sharded.on_mesh(jax.value_and_grad(square(split_product), (0, 1, 2)), (1, 4), specs, (P(), specs))
    expected = exact.run(jax.value_and_grad(square(dense_product), (0, 1, 2)), X, W, U).outputs
    assert asserts.worst_relative(ours(X, W, U), expected) < 1e-14


def test_compiled_split_products_have_the_dense_value():
    got = sharded.compile_on_mesh(split_product, (1, 4), (P(), COLUMNS, ROWS), P())(X, W, U)
    assert asserts.relative(got, exact.run(dense_product, X, W, U).outputs) < 1e-6


def test_gather_last_is_whole_forward_and_a_slice_backward():
    def gathered(x):
        return (collectives.gather_last(x) * W[:3, :8]).sum()

    value, grad = sharded.on_mesh(jax.value_and_grad(gathered), (1, 4), (COLUMNS,), (P(), COLUMNS))(X)
    assert abs(value / (np.float64(X) * W[:3, :8]).sum() - 1) < 1e-14
    np.testing.assert_array_equal(grad, W[:3, :8])


def test_collectives_do_nothing_on_axes_of_size_1():
    def every(x):
        return (
            collectives.fan_out(x),
            collectives.reduce(x),
            collectives.gather_last(x),
            x * collectives.local(1),
            x + collectives.offset(9),
        )

    for got in jax.vmap(every, axis_name="mp", axis_size=1, in_axes=None)(np.arange(6).reshape(2, 3)):
        np.testing.assert_array_equal(got[0], np.arange(6).reshape(2, 3))


def test_local_and_offset_cover_an_axis():
    def pieces():
        return (collectives.offset(collectives.local(24)) + jax.numpy.arange(collectives.local(24))).reshape(-1)

    np.testing.assert_array_equal(sharded.on_mesh(pieces, (1, 4), (), P("mp"))(), np.arange(24))


def trace(**overrides):
    """Trace a new model: nothing is compiled."""
    config = shared.tiny(mesh="2x4", **overrides)
    model = Model.on(config, mesh.make(config))
    key = jax.random.key_data(jax.random.key(0))
    return jax.eval_shape(lambda params, batch: model.loss_and_grad(params, batch, key), model.abstract, shared.batch())


@pytest.mark.parametrize("block", ["parallel", "sequential"])
@pytest.mark.parametrize("scan", [True, False])
def test_missing_psum_is_rejected_when_traced(broken, block, scan):
    trace(block=block, scan=scan)
    broken(collectives, "reduce", lambda x, *_: x)
    with pytest.raises((TypeError, ValueError), match=r"vary|varying|replicated"):
        trace(block=block, scan=scan)


def test_doubled_psum_breaks_parity(broken):
    config = shared.tiny(mesh="1x4")
    model = Model.on(config, mesh.make(config))
    params, batch = verify_exact.draw_parameters(config), shared.batch()

    def loss():
        return exact.run(lambda params, batch: model.evaluate(params, batch)[1].loss, params, batch).outputs

    expected = exact.run(lambda params: reference.loss(config, params, **batch)[0], params).outputs
    assert abs(loss() / expected - 1) < 1e-13
    broken(collectives, "reduce", lambda x, *_: lax.psum(lax.psum(x, "mp"), "mp"))
    assert abs(loss() / expected - 1) > 3e-5  # the loss's own sums, in kernels/, are not doubled: the layers' alone
