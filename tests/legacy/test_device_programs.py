"""The xmapped functions that run under shard_map, and those under vmap: mapped_program.py. Both give the same."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from shardformer import legacy
from shardformer.legacy import SerialLoop, xmap
from tests.legacy.programs.registry import floats, mesh

X = floats(8, 3)


def total(x):
    return lax.psum(x * x, "i") + lax.axis_index("i").astype(x.dtype)


def branches(body):
    return lambda x: lax.cond(lax.psum(jnp.sum(x), "i") > 0, body, lambda x: -x, x)


def looped(x):
    return lax.while_loop(lambda k_x: k_x[0] < 2, lambda k_x: (k_x[0] + 1, total(k_x[1])), (0, x))[1]


def with_inner_xmap(x):
    return xmap(lambda y: lax.psum(y, "k"), ["k", ...], [...], axis_resources={"k": "y"})(jnp.stack([x, 2 * x]))


def drawn_by_rbg(x):
    key = jax.random.wrap_key_data(jnp.full(4, 3, jnp.uint32), impl="rbg")
    return x + jax.random.uniform(key, x.shape)


def printing(x):
    jax.debug.print("{}", x[0])
    return x


def mapped(body, resources="x"):
    return xmap(body, ["i", ...], ["i", ...], axis_resources={"i": resources} if resources else {})


def runs_on_devices(body, resources="x", **shape):
    with mesh(**shape or {"x": 8}):
        return "manual_computation" in mapped(body, resources).lower(X).as_text()


def operations(lowered):
    return sorted(re.findall(r"= \S+ ([\w-]+)\(", lowered.compile().as_text()))


def test_body_compiles_to_the_operations_of_shard_map():
    gradient = jax.checkpoint(jax.grad(lambda x: jnp.sum(jnp.sin(total(x)))))
    with mesh(x=8) as around:
        direct = jax.shard_map(lambda x: gradient(x[0])[None], in_specs=P("i"), out_specs=P("i"), check_vma=False,
                               mesh=jax.sharding.Mesh(around.devices, ("i",)))  # fmt: skip
        expected = operations(jax.jit(direct).lower(X))
        assert operations(mapped(gradient).lower(X)) == expected
        assert operations(mapped(lambda x: gradient(x) + x).lower(X)) != expected


@pytest.mark.parametrize(
    "body",
    [total, jax.grad(lambda x: jnp.sum(total(x))), jax.checkpoint(total), jax.jit(total), branches(lambda x: 2 * x)],
    ids=["collective", "gradient", "checkpoint", "jit", "branches"],
)
def test_body_runs_on_devices(body):
    assert runs_on_devices(body)
    assert runs_on_devices(body, ("x", "y"), x=4, y=2)
    with mesh(x=8):
        np.testing.assert_allclose(mapped(body)(X), mapped(body, None)(X), rtol=1e-6)


@pytest.mark.parametrize(
    ("body", "resources", "shape"),
    [
        (total, "x", {"x": 4}),
        (total, ("y", "x"), {"x": 4, "y": 2}),
        (lambda x: x, SerialLoop(2), {"x": 8}),
        (branches(total), "x", {"x": 8}),
        (branches(lambda x: branches(total)(x)), "x", {"x": 8}),
        (looped, "x", {"x": 8}),
        (with_inner_xmap, "x", {"x": 8, "y": 1}),
        (branches(with_inner_xmap), "x", {"x": 8, "y": 1}),
        (drawn_by_rbg, "x", {"x": 8}),
        (printing, "x", {"x": 8}),
    ],
    ids=["longer", "order", "loop", "branch", "deep", "while", "inner", "inner in a branch", "rbg", "effect"],
)
def test_body_runs_under_vmap(body, resources, shape):
    assert not runs_on_devices(body, resources, **shape)


def test_calls_under_a_transform_run_under_vmap():
    """A gradient taken outside is that of the full function; shard_map's is not, if a psum reaches the result."""
    with mesh(x=8):
        f = mapped(total)
        f(X)
        assert "shard_map" not in str(jax.make_jaxpr(f)(X))
        gradient = jax.grad(lambda x: jnp.sum(f(x)))(X)
        closed_over = jax.grad(lambda w: jnp.sum(mapped(lambda x: lax.psum(x * w, "i"))(X)))(2.0)
    np.testing.assert_allclose(gradient, 16 * X, rtol=1e-6)
    np.testing.assert_allclose(closed_over, 8 * X.sum(), rtol=1e-6)


# A call like the last one runs its program at once -------------------------------------------------------------------


def test_a_call_unlike_the_last_one_finds_its_own_program():
    def count(x):
        return x + lax.psum(jnp.ones((), x.dtype), "i")

    f = mapped(count)
    y = jnp.asarray(X)
    with mesh(x=8):
        for _ in range(3):
            split = f(y)
        y = split
        for _ in range(2):
            y = f(y)
        np.testing.assert_array_equal(y, X + 24)
        assert y.sharding == split.sharding
        np.testing.assert_array_equal(f(y[:, :2]), y[:, :2] + 8)
        np.testing.assert_array_equal(f(jax.device_put(y, jax.devices()[5])), y + 8)
        np.testing.assert_array_equal(f(y.astype(jnp.int32)), y.astype(jnp.int32) + 8)
        np.testing.assert_array_equal(jax.grad(lambda y: jnp.sum(f(y) ** 2))(y), 2 * (y + 8))
    with mesh(x=4):
        assert len(f(f(y)).sharding.device_set) == 4
    with pytest.raises(ValueError, match="no mesh is in scope"):
        f(y)


def test_strict_is_seen_by_the_next_call():
    f = xmap(lambda x: x, ["i", ...], [...])
    y = jnp.asarray(X)
    with pytest.warns(UserWarning, match="index 0"):
        f(f(y)[None])
    f(y), f(y)
    with legacy.installed(strict=True), pytest.raises(TypeError, match="out_axes"):
        f(y)


def test_warning_of_a_repeated_call_names_its_line():
    f = xmap(lambda x: x, ["i", ...], [...])
    with pytest.warns(UserWarning, match="index 0"):
        f(jnp.asarray(X)), f(jnp.asarray(X))
    with pytest.warns(UserWarning, match="index 0") as told:
        f(jnp.asarray(X, jnp.int32))
    assert [warning.filename for warning in told] == [__file__]


def test_donated_arrays_are_deleted_at_every_call():
    f = xmap(lambda x: x + 1, ["i", ...], ["i", ...], donate_argnums=0)
    for _ in range(3):
        y = jnp.asarray(X)
        f(y)
        assert y.is_deleted()
