"""Microbatches of a function of shards against the plain function of the full batch, on every mesh, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import collectives, exact
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


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


@functools.cache
def dense_value_and_gradient():
    return run_exactly(jax.value_and_grad(dense_loss), PARAMS, X)


@functools.cache
def dense_of_examples():
    """Returns each example's loss and gradient, [ROWS, ...]."""
    return run_exactly(jax.vmap(jax.value_and_grad(dense_loss), (None, 0)), PARAMS, X[:, None])


def on_shards(body, shape, out_specs, run=sharded.on_mesh):
    return run(body, shape, (SPECS, P("dp")), out_specs)(PARAMS, X)


def accumulate(params, x, size, **options):
    """Returns the mean over devices of what microbatches of `size` rows accumulate."""
    params = jax.tree.map(lambda p: lax.pcast(p, "dp", to="varying"), params)
    return lax.pmean(microbatch(jax.value_and_grad(loss), 1, size, **options)(params, x), "dp")


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_microbatch_is_the_mean_over_all_examples(shape, size):
    expected, out_specs = dense_value_and_gradient(), (P(), SPECS)
    got = on_shards(functools.partial(accumulate, size=size), shape, out_specs)
    assert asserts.worst_relative(got, expected) < 1e-13

    summed = functools.partial(accumulate, size=size, accumulator=AccumulationType.SUM)
    parts = ROWS // shape[0] // size
    times = jax.tree.map(lambda leaf: parts * leaf, expected)  # a wrong step, unless there is but one part
    assert asserts.worst_relative(on_shards(summed, shape, out_specs), times) < 1e-13


def test_compiled_microbatch_is_the_mean_over_all_examples():
    mean = functools.partial(accumulate, size=2)
    got = on_shards(mean, (2, 4), (P(), SPECS), run=sharded.compile_on_mesh)
    assert asserts.worst_relative(got, dense_value_and_gradient()) < 1e-6


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

    expected = run_exactly(jax.vmap(lambda x: expensive(x, x)), X)
    assert asserts.relative(on_shards(body, shape, P("dp")), expected) < 1e-13


def leaf_norms(gradient, total=lambda square, spec: lax.psum(square, "mp") if "mp" in spec else square):
    return {name: jnp.sqrt(total(jnp.square(leaf).sum(), SPECS[name])) for name, leaf in gradient.items()}


def compute_one_by_one(params, x, size):
    """Returns the mean gradient, and each example's loss and norms."""
    gradient, each = micro_grad(loss, microbatch_size=size, metrics_fn=leaf_norms)(params, x)
    return lax.pmean(gradient, "dp"), each.values, each.metrics


def one_by_one_in_numpy():
    values, gradients = dense_of_examples()
    norms = {name: np.sqrt(np.square(leaf).reshape(ROWS, -1).sum(1)) for name, leaf in gradients.items()}
    return dense_value_and_gradient()[1], values, norms


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shape", SHAPES)
def test_micro_grad_sees_one_example_at_a_time(shape, size):
    body = functools.partial(compute_one_by_one, size=size)
    assert asserts.worst_relative(on_shards(body, shape, (SPECS, P("dp"), P("dp"))), one_by_one_in_numpy()) < 1e-13


def test_compiled_micro_grad_sees_one_example_at_a_time():
    body = functools.partial(compute_one_by_one, size=2)
    got = on_shards(body, (2, 4), (SPECS, P("dp"), P("dp")), run=sharded.compile_on_mesh)
    assert asserts.worst_relative(got, one_by_one_in_numpy()) < 1e-6


@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1])
def test_uncast_micro_grad_sums_over_shards(shape):
    """optax's own, on parameters that are the same on every dp: the reason why ours casts them."""

    def body(params, x):
        return optax.microbatching.micro_grad(loss, microbatch_size=1, metrics_fn=leaf_norms)(params, x)[1].metrics

    norms = sharded.on_mesh(body, shape, (SPECS, P("dp")), P())(PARAMS, X)  # the types know: no longer split over dp
    assert {leaf.shape for leaf in norms.values()} == {(ROWS // shape[0],)}
    rows = np.arange(ROWS).reshape(shape[0], -1)
    gradients = dense_of_examples()[1]
    for name, leaf in norms.items():
        mixed = [np.linalg.norm(gradients[name][column].sum(0)) for column in rows.T]
        assert asserts.relative(leaf, mixed) < 1e-13


def test_micro_grad_takes_two_arguments_and_aux():
    def split(gain, matrices, x):
        return (dense_loss(matrices | {"gain": gain}, x), x.sum())

    gain, matrices = PARAMS["gain"], {name: PARAMS[name] for name in ("up", "down")}
    grad = micro_grad(split, True, (0, 1), batch_argnums=2, microbatch_size=4)
    (got, gradient), each = run_exactly(grad, gain, matrices, X)
    assert asserts.worst_relative(gradient | {"gain": got}, dense_value_and_gradient()[1]) < 1e-13
    np.testing.assert_allclose(each.aux, X.sum(1, np.float64), rtol=1e-12)


def test_microbatch_that_does_not_divide_is_rejected():
    with pytest.raises(ValueError, match="batch_size=16 must be divisible by microbatch_size=3"):
        microbatch(dense_loss, 1, 3)(PARAMS, X)
