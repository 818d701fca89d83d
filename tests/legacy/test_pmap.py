"""A pmap inside of a pmap gives the values of jax 0.4.13; today's JAX rejects it."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import pmap as module
from shardformer.legacy.pmap import pmap

X = np.arange(16, dtype=np.float32).reshape(2, 4, 2)
REJECTED = "should match the mesh"  # JAX's words


def test_collectives_over_either_axis_and_both():
    def places(x):
        return x - lax.psum(x, "j") + lax.pmean(x, ("i", "j")), 10 * lax.axis_index("i") + lax.axis_index("j")

    moved, numbers = pmap(pmap(places, "j"), "i")(X)
    np.testing.assert_array_equal(moved, X - X.sum(1, keepdims=True) + X.mean((0, 1)))
    assert numbers.tolist() == [[0, 1, 2, 3], [10, 11, 12, 13]]
    with pytest.raises(ValueError, match=REJECTED):
        jax.pmap(jax.pmap(places, "j"), "i")(X)


def test_gradient_reaches_the_instances_of_both():
    loss = pmap(pmap(lambda x: jnp.sin(lax.psum(x, ("i", "j"))), "j"), "i")
    expected = np.broadcast_to(8 * np.cos(X.sum((0, 1))), X.shape)
    np.testing.assert_allclose(jax.grad(lambda x: loss(x).sum())(X), expected, rtol=1e-5)


def test_axes_sizes_static_and_named_arguments():
    def outer(x):
        scaled = pmap(lambda times, a, b: a * len(times) + b, in_axes=(None, 0, None), static_broadcasted_argnums=0)
        every = pmap(lambda times, a: a * len(times), static_broadcasted_argnums=(0,))
        counted = pmap(lambda: lax.axis_index("k"), "k", axis_size=3)
        return scaled("abc", x, x[0]), every("ab", x), counted(), pmap(lambda *, a: a + 1)(a=x)

    scaled, every, counted, named = pmap(outer)(X)
    np.testing.assert_array_equal(scaled, 3 * X + X[:, :1])
    np.testing.assert_array_equal(every, 2 * X)
    assert counted.tolist() == [[0, 1, 2]] * 2
    np.testing.assert_array_equal(named, X + 1)


def test_inner_devices_are_rejected():
    with pytest.raises(ValueError, match="Nested pmap with explicit devices argument"):
        pmap(pmap(jnp.sin, devices=jax.devices()[:4]))(X)
    pmap(pmap(jnp.sin), devices=jax.devices()[:2])(X)


def test_a_single_pmap_stays_on_its_devices():
    chosen = jax.devices()[2:4]
    double = pmap(lambda x: 2 * x, devices=chosen)
    assert double(X).sharding.device_set == set(chosen)
    assert double.lower(X).compile()(X).shape == X.shape


def test_sizes_are_named_in_the_error():
    with pytest.raises(ValueError, match=r"inconsistent sizes for array axes to be mapped: \[7, 8\]"):
        pmap(jnp.add)(np.ones(8), np.ones(7))
    with pytest.raises(ValueError, match="size 9, which requires 9 replicas, but has 8 devices"):
        pmap(jnp.sin)(np.ones(9))
    with pytest.raises(ValueError, match="size 8, which requires 8 replicas, but has 2 devices"):
        pmap(lambda n, x, y: x + y, in_axes=(None, None, 1), static_broadcasted_argnums=0, devices=jax.devices()[:2])(
            "n", np.ones(3), np.ones((3, 8))
        )


def test_other_errors_stay():
    def fails(x):
        raise ValueError("of the body")

    with pytest.raises(ValueError, match="of the body"):
        pmap(fails)(np.ones(8))
    with pytest.raises(ValueError, match="in_axes"):
        pmap(jnp.add, in_axes=(0, 0, 0))(np.ones(8), np.ones(8))


def test_with_jit_disabled_no_device_runs_alone(monkeypatch):
    x, axes = np.arange(16, dtype=np.float32).reshape(2, 8), {"in_axes": 1, "out_axes": (0, 1, None, 0)}

    def body(x, *, y):
        return x + lax.psum(y["y"], "i"), 2 * x, lax.pmax(x, "i"), np.ones(2)

    compiled = pmap(body, "i", **axes)(x, y={"y": x.T})
    monkeypatch.setattr(module, "_pmap", lambda *_, **__: types.SimpleNamespace(lower=None))  # that cannot be called
    with jax.disable_jit():
        results = pmap(body, "i", **axes)(x, y={"y": x.T})
        gradient = jax.grad(lambda x: pmap(lambda x: jnp.sin(lax.pmean(x, "i")), "i")(x).sum())(x[0])
    np.testing.assert_allclose(gradient, np.full(8, np.cos(x[0].mean())), rtol=1e-5)
    for got, expected in zip(results, compiled, strict=True):
        np.testing.assert_array_equal(got, expected)
        assert got.sharding.is_equivalent_to(expected.sharding, got.ndim)


def test_with_jit_disabled_jax_runs_groups_and_errors():
    with jax.disable_jit():
        grouped = pmap(lambda x: lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]), "i")
        assert grouped(np.arange(4.0)).tolist() == [1, 1, 5, 5]
        with pytest.raises(ValueError, match="requires 9 replicas"):
            pmap(jnp.sin)(np.ones(9))
        with pytest.raises(ValueError, match="inconsistent sizes"):
            pmap(jnp.add)(np.ones(8), np.ones(4))


def test_with_jit_disabled_some_devices_are_permuted(monkeypatch):
    def permute(pairs, x=None):
        return pmap(lambda own: lax.ppermute(own if x is None else x, "i", pairs), "i")(np.arange(4.0) + 1).tolist()

    monkeypatch.setattr(module, "_pmap", lambda *_, **__: types.SimpleNamespace(lower=None))  # that cannot be called
    with jax.disable_jit():
        assert permute([(0, 1), (2, 0)]) == [3, 1, 0, 0]
        assert permute([(0, 1)], np.float32(5)) == [0, 5, 0, 0]
        assert permute([(0, 1), (1, 2), (2, 3), (3, 0)]) == [4, 1, 2, 3]
        with pytest.raises(NotImplementedError, match=r"axes \('i', 'j'\) of pmaps"):
            pmap(pmap(lambda x: lax.ppermute(x, ("i", "j"), [(0, 1)]), "j"), "i")(X)
    with pytest.raises(AssertionError, match="Permutation"):
        jax.vmap(lambda x: lax.ppermute(x, "i", [(0, 1)]), axis_name="i")(X)


@pytest.mark.parametrize("error", [ValueError, NotImplementedError])
def test_with_jit_disabled_a_failing_body_runs_once(error, monkeypatch):
    def fail(x):
        runs.append("body")
        raise error

    def run(*_, **__):
        runs.append("jax")

    runs = []
    monkeypatch.setattr(module, "_pmap", lambda *_, **__: run)
    run.lower = None
    with jax.disable_jit():
        with pytest.raises(error):
            pmap(fail)(X)
        assert runs == ["body"]
        pmap(lambda x: lax.psum(x, "i", axis_index_groups=[[0], [1]]), "i")(X)
    assert runs == ["body", "jax"]


@pytest.mark.parametrize(("impl", "default", "expected"), [
    ("threefry2x32", "threefry2x32", []), ("rbg", "threefry2x32", ["jax"]), ("threefry2x32", "unsafe_rbg", ["jax"])
])  # fmt: skip
def test_with_jit_disabled_jax_draws_with_rbg(impl, default, expected, monkeypatch):
    def run(*_, **__):
        runs.append("jax")

    runs, keys = [], jax.random.split(jax.random.key(0, impl=impl), 2)
    monkeypatch.setattr(module, "_pmap", lambda *_, **__: run)
    run.lower = None
    with jax.disable_jit(), jax.default_prng_impl(default):
        pmap(lambda keys: keys["key"])({"key": keys})
    assert runs == expected


@pytest.mark.parametrize(
    ("sizes", "spec"), [((8,), P()), ((4, 2), P("x")), ((4, 2), P("x", "y")), ((2, 1), P("x")), ((1, 1), P())]
)
def test_arrays_in_other_layouts_are_moved(sizes, spec):
    x = np.arange(64, dtype=np.float32).reshape(8, 8)
    mesh = Mesh(np.array(jax.devices()[-np.prod(sizes) :]).reshape(sizes), ("x", "y")[: len(sizes)])
    placed = jax.device_put(x, NamedSharding(mesh, spec))
    with pytest.raises(ValueError, match="does not match the sharding"):
        jax.pmap(jnp.sin)(placed)
    out = pmap(lambda a, t, *, b: a + t[0] - lax.psum(b, "i"), "i", in_axes=(0, (1, None)), devices=jax.devices()[:8])(
        placed, (placed, placed), b=placed
    )
    np.testing.assert_array_equal(out, x + x.T - x.sum(0))
    assert [shard.device for shard in out.addressable_shards] == jax.devices()
    gradient = jax.grad(lambda a: pmap(jnp.sin)(a).sum())(placed)
    np.testing.assert_allclose(gradient, np.cos(x), rtol=1e-5, atol=1e-6)
