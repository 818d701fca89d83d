"""Microbatches of a function of shards against the plain function of the full batch, on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer.parallel import collectives
from shardformer.parallel.microbatch import AccumulationType, micro_grad, micro_vmap, microbatch
from tests import asserts, sharded, shared

D, F, ROWS = 8, 16, 16
SHAPES = [(1, 1), *[tuple(map(int, mesh.split("x"))) for mesh in shared.MESHES]]
PARAMS = {"gain": 1 + 0.1 * sharded.normal(0, D), "up": sharded.normal(1, D, F), "down": sharded.normal(2, F, D)}
SPECS = {"gain": P(), "up": P(None, "mp"), "down": P("mp", None)}
X = sharded.normal(3, ROWS, D)
SIZES = [1, 2]  # of a microbatch; at dp=8 a shard has two rows


def loss(params, x_BD, total=collectives.reduce):
    """A split feed-forward; dense if `total` is the identity."""
    h = x_BD * params["gain"][None]
    return jnp.square(x_BD - total(jnp.tanh(h @ params["up"]) @ params["down"])).mean()


def dense_loss(params, x_BD):
    return loss(params, x_BD, total=lambda whole: whole)


def on_shards(body, shape, out_specs):
    return shared.on_host(sharded.on_mesh(body, shape, (SPECS, P("dp")), out_specs)(PARAMS, X))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_microbatch_is_the_mean_over_all_examples(shape, size):
    expected = jax.value_and_grad(dense_loss)(PARAMS, X)

    def accumulate(params, x, **options):
        params = jax.tree.map(lambda p: lax.pcast(p, "dp", to="varying"), params)
        return lax.pmean(microbatch(jax.value_and_grad(loss), 1, size, **options)(params, x), "dp")

    assert asserts.worst_relative(on_shards(accumulate, shape, (P(), SPECS)), expected) < 1e-6

    def summed(params, x):
        return accumulate(params, x, accumulator=AccumulationType.SUM)

    parts = ROWS // shape[0] // size
    times = jax.tree.map(lambda leaf: parts * leaf, expected)
    assert (
        asserts.worst_relative(on_shards(summed, shape, (P(), SPECS)), times) < 1e-6
    )  # a wrong step, unless there is but one part


def expensive(x, rows):
    """Seed 000's function: the part that `rows` contribute."""
    return jax.nn.softmax(jnp.sin(jnp.outer(rows, x))).sum(axis=0)


@pytest.mark.parametrize("size", [*SIZES, None])
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_vmap_is_vmap(shape, size):
    def split(x_D):
        rows = collectives.local(D)
        return collectives.reduce(
            expensive(x_D, lax.dynamic_slice_in_dim(collectives.fan_out(x_D), collectives.offset(rows), rows))
        )

    def body(_, x):
        return micro_vmap(split, microbatch_size=size)(x)

    assert asserts.relative(on_shards(body, shape, P("dp")), jax.vmap(lambda x: expensive(x, x))(X)) < 1e-6


def leaf_norms(gradient, total=lambda square, spec: lax.psum(square, "mp") if "mp" in spec else square):
    return {name: jnp.sqrt(total(jnp.square(leaf).sum(), SPECS[name])) for name, leaf in gradient.items()}


def single_gradients():
    return [jax.grad(dense_loss)(PARAMS, X[i : i + 1]) for i in range(ROWS)]


def expected_norms():
    return {name: np.array([np.linalg.norm(gradient[name]) for gradient in single_gradients()]) for name in PARAMS}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_grad_sees_one_example_at_a_time(shape, size):
    def body(params, x):
        gradient, each = micro_grad(loss, microbatch_size=size, metrics_fn=leaf_norms)(params, x)
        return lax.pmean(gradient, "dp"), each.values, each.metrics

    gradient, values, norms = on_shards(body, shape, (SPECS, P("dp"), P("dp")))
    assert asserts.worst_relative(gradient, jax.grad(dense_loss)(PARAMS, X)) < 1e-6
    np.testing.assert_allclose(values, [dense_loss(PARAMS, X[i : i + 1]) for i in range(ROWS)], rtol=1e-5)
    assert asserts.worst_relative(norms, expected_norms()) < 1e-6


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1])
def test_uncast_micro_grad_sums_over_shards(shape):
    """optax's own, on parameters that are the same on every dp: the reason why ours casts them."""

    def body(params, x):
        return optax.microbatching.micro_grad(loss, microbatch_size=1, metrics_fn=leaf_norms)(params, x)[1].metrics

    norms = sharded.on_mesh(body, shape, (SPECS, P("dp")), P())(PARAMS, X)  # the types know: no longer split over dp
    assert {leaf.shape for leaf in norms.values()} == {(ROWS // shape[0],)}
    rows = np.arange(ROWS).reshape(shape[0], -1)
    gradients = single_gradients()
    for name, leaf in norms.items():
        mixed = [np.linalg.norm(sum(gradients[i][name] for i in column)) for column in rows.T]
        assert asserts.relative(leaf, mixed) < 1e-5


def test_micro_grad_takes_two_arguments_and_aux():
    def split(gain, matrices, x):
        return (dense_loss(matrices | {"gain": gain}, x), x.sum())

    gain, matrices = PARAMS["gain"], {name: PARAMS[name] for name in ("up", "down")}
    grad = micro_grad(split, True, (0, 1), batch_argnums=2, microbatch_size=4)
    (got, gradient), each = grad(gain, matrices, X)
    assert asserts.worst_relative(gradient | {"gain": got}, jax.grad(dense_loss)(PARAMS, X)) < 1e-6
    np.testing.assert_allclose(each.aux, X.sum(1), rtol=1e-5)


def test_microbatch_that_does_not_divide_is_rejected():
    with pytest.raises(ValueError, match="batch_size=16 must be divisible by microbatch_size=3"):
        microbatch(dense_loss, 1, 3)(PARAMS, X)
