"""Norms of examples' gradients on meshes, against a plain loop over the examples, in float64."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import dense_reference as reference
from shardformer.analysis import verify_exact
from shardformer.layout import mesh
from shardformer.model import ROWS, Model
from shardformer.model.measuring import Measures
from shardformer.parallel import example_norms
from tests import asserts, shared

KEY = np.asarray(jax.random.key_data(jax.random.key(5)))
EVERYTHING = {
    "block": "sequential", "positions": "learned", "bias": "all", "norm": "rmsnorm",
    "dropout": 0.2, "z_loss": 1e-2, "remat": "full", "loss_chunk": 5,
}  # fmt: skip


@functools.cache
def model(name, **overrides):
    settings = shared.tiny(mesh=name, **overrides)
    return Model.on(settings, mesh.make(settings))


def example_square_norms(m, specs=None, size=1):
    """(params, batch, dropout_key) -> squares, of the model's own specs or, to see the difference, of others."""
    if specs is None and size == 1:
        return Measures(m).example_square_norms

    def body(params, batch, dropout_key):
        def objective(params, batch):
            return m.local_objective(params, batch, dropout_key)[0]

        return example_norms.measure_squares(objective, params, m.number_rows(batch), specs or m.specs, size)

    return m.shard_map(body, (m.specs, ROWS, P()), ROWS)


@functools.cache
def draw_parameters(**overrides):
    return verify_exact.draw_parameters(model("1x1", **overrides).config)


def squares(name, specs=None, size=1, **overrides):
    function = example_square_norms(model(name, **overrides), specs, size)
    return exact.run(function, draw_parameters(**overrides), shared.batch(), KEY).outputs


@functools.cache
def loop(**overrides):
    """Returns every example's gradient, [8, ...], one after the other.

    It is the dense model's, or one device's where dropout needs a key.
    """
    if overrides:
        m = model("1x1", **overrides)

        def objective(params, row, key):
            return m.local_objective(params, row, key)[0]

        def body(params, row, key):
            return jax.grad(objective)(m.replicas.make_local(params), row, key)

        def summed(*args):
            return jax.lax.pmean(body(*args), "dp")

        grad = m.shard_map(summed, (m.specs, ROWS, P()), m.specs)
    else:

        def dense(params, row, key):
            return reference.loss(shared.tiny(), params, row["tokens"], row["targets"])[1]

        grad = jax.grad(dense)
    batch = shared.batch() | {"examples": np.arange(8, dtype=np.int32)}
    rows = jax.tree.map(lambda x: x[:, None], batch)

    def run(params, rows, key):
        return jax.lax.map(lambda row: grad(params, row, key), rows)

    return exact.run(run, draw_parameters(**overrides), rows, KEY).outputs


def norms(module, leaf):
    """Returns [8] or, of stacked leaves, [8, L]."""
    kept = leaf.shape[: 2 if "layers" in module else 1]
    return np.linalg.norm(leaf.reshape(*kept, -1), axis=-1)


def expected_norms(**overrides):
    return {
        module: {name: norms(module, leaf) for name, leaf in leaves.items()}
        for module, leaves in loop(**overrides).items()
    }


def worst(got, expected, scale):
    """The largest error of any example's norm, relative to it; k_bias, whose gradient is rounding, to the whole's."""
    errors = {
        f"{module}/{name}": np.abs(np.sqrt(got[module][name]) - norm) / (scale[:, None] if name == "k_bias" else norm)
        for module, leaves in expected.items()
        for name, norm in leaves.items()
    }
    return max(error.max() for error in errors.values())


@pytest.mark.parametrize(
    ("name", "overrides"),
    [("2x4", {}), ("4x2", EVERYTHING)],
    ids=lambda value: value if isinstance(value, str) else "everything" if value else "plain",
)
def test_norms_equal_a_loop_over_examples_on_every_mesh(name, overrides):
    expected, got = expected_norms(**overrides), squares(name, **overrides)
    total = np.sqrt(sum((leaf**2).reshape(8, -1).sum(1) for leaf in jax.tree.leaves(expected)))
    assert worst(got, expected, total) < 1e-12
    np.testing.assert_allclose(np.sqrt(exact.run(example_norms.sum_all, got).outputs), total, rtol=1e-13)
    layers = [leaf**2 for module, leaves in expected.items() if "layers" in module for leaf in leaves.values()]
    np.testing.assert_allclose(exact.run(example_norms.sum_by_layer, got).outputs, sum(layers), rtol=1e-13)
    assert np.ptp(total) > 0.01 * total.mean()  # examples that differ


@pytest.mark.slow
def test_compiled_norms_equal_a_loop_over_examples():
    m = model("4x2", **EVERYTHING)
    params = jax.device_put(draw_parameters(**EVERYTHING), m.shardings)
    got = shared.on_host(jax.jit(example_square_norms(m))(params, shared.batch(), KEY))
    expected = expected_norms(**EVERYTHING)
    total = np.sqrt(sum((leaf**2).reshape(8, -1).sum(1) for leaf in jax.tree.leaves(expected)))
    assert worst(got, expected, total) < 1e-5
    np.testing.assert_allclose(np.sqrt(example_norms.sum_all(got)), total, rtol=1e-6)


def test_mean_of_the_loop_is_the_gradient_of_the_batch():
    """Under dropout as well: an example alone has the mask that it has among the others."""
    mean = jax.tree.map(lambda rows: rows.mean(0), loop(**EVERYTHING))
    m = model("4x2", **EVERYTHING)

    def compute(key):
        return exact.run(m.loss_and_grad, draw_parameters(**EVERYTHING), shared.batch(), key).outputs[1]

    errors = jax.tree.map(asserts.relative, compute(KEY), mean)
    errors["transformer/layers"].pop("k_bias")
    assert max(jax.tree.leaves(errors)) < 1e-12
    other = compute(KEY + np.uint32(1))
    assert asserts.relative(other["transformer/layers"]["q"], mean["transformer/layers"]["q"]) > 1e-2


def test_replicated_parameters_counted_per_shard_are_wrong():
    everywhere = jax.tree.map(lambda spec: P("mp"), model("2x4").specs)
    got, expected = squares("2x4", everywhere), expected_norms()
    times = {module: {name: got[module][name].mean() / (norm**2).mean() for name, norm in leaves.items()}
             for module, leaves in expected.items()}  # fmt: skip
    np.testing.assert_allclose(times["transformer/layers"]["o"], 1, rtol=1e-12)
    np.testing.assert_allclose(times["transformer/layers/norm"]["scale"], 4, rtol=1e-12)
    np.testing.assert_allclose(times["transformer/head/norm"]["scale"], 4, rtol=1e-12)


def test_unsummed_norms_of_split_parameters_are_rejected():
    nowhere = jax.tree.map(lambda spec: P(), model("2x4").specs)
    with pytest.raises(ValueError, match="mp"):
        squares("2x4", nowhere)


@pytest.mark.slow
def test_gradients_never_exist_for_all_examples_at_once():
    m = model("1x8", d_model=64, batch=8)
    key = jax.ShapeDtypeStruct(KEY.shape, KEY.dtype)

    def temporary(size):
        lowered = jax.jit(example_square_norms(m, size=size)).lower(m.abstract, shared.batch(), key)
        return lowered.compile().memory_analysis().temp_size_in_bytes

    parameters = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(m.init(0)))
    assert temporary(8) - temporary(1) > 6 * parameters


# The noise scale.


def test_noise_of_a_batch_is_that_of_the_covariance():
    rng = np.random.RandomState(0)
    gradients_BD = (rng.normal(size=(6, 40)) + 0.5).astype(np.float32)
    mean_D = gradients_BD.mean(0)
    square = jnp.square(mean_D).sum()
    noise = example_norms.estimate_noise(jnp.square(gradients_BD).sum(1), square)
    variance = gradients_BD.var(0, ddof=1).sum()
    np.testing.assert_allclose(noise.variance, variance, rtol=1e-5)
    np.testing.assert_allclose(noise.signal, square - variance / 6, rtol=1e-5)
    np.testing.assert_allclose(noise.scale, noise.variance / noise.signal, rtol=1e-6)


def test_noise_is_unbiased():
    """Over many batches of 4: where the plain mean square overshoots the signal by a quarter of the variance."""
    rng = np.random.RandomState(0)
    true_D, deviation_D = np.full(8, 0.5), np.linspace(0.5, 1.5, 8)
    batches = (true_D[None, None] + deviation_D[None, None] * rng.normal(size=(20000, 4, 8))).astype(np.float32)
    mean_square = np.square(batches.mean(1)).sum(1)
    noise = jax.vmap(example_norms.estimate_noise)(np.square(batches).sum(2), mean_square)
    variance, signal = np.square(deviation_D).sum(), np.square(true_D).sum()
    np.testing.assert_allclose(noise.variance.mean(), variance, rtol=0.01)
    np.testing.assert_allclose(noise.signal.mean(), signal, rtol=0.03)
    assert mean_square.mean() > 1.5 * signal


def test_noise_of_a_model_is_that_of_its_gradients():
    rows = np.concatenate([leaf.reshape(8, -1) for leaf in jax.tree.leaves(loop())], axis=1)

    def estimate(squares, mean_square):
        return example_norms.estimate_noise(example_norms.sum_all(squares), mean_square)

    noise = exact.run(estimate, squares("4x2", size=2), np.square(rows.mean(0)).sum()).outputs
    of_eight = np.float32(8 / 7)  # a constant of the program
    np.testing.assert_allclose(noise.variance, rows.var(0).sum() * of_eight, rtol=1e-12)


def test_noise_of_one_example_is_rejected():
    with pytest.raises(ValueError, match="batch of 1 example cannot be estimated; give at least 2"):
        example_norms.estimate_noise(jnp.ones(1), jnp.ones(()))
