"""Constraints and layouts of results give right products where XLA's are wrong: on CPU devices in three mesh axes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import installed
from shardformer.legacy.migration.shard_map_helpers import jit_in_layout, mesh_scope
from shardformer.legacy.pjit import pjit, with_sharding_constraint

SPECS = P(("dp", "fsdp"), None, "mp"), P("mp", "fsdp")
FIRST, SECOND = np.arange(512).reshape(4, 8, 16) % 7 - 3, np.arange(512).reshape(16, 32) % 5 - 2  # float32 is exact


def devices(*sizes: int):
    return np.array(jax.devices()).reshape(sizes)


def easylm_layouts():
    mesh = Mesh(devices(2, 2, 2), ("dp", "fsdp", "mp"))
    return [NamedSharding(mesh, spec) for spec in SPECS]


def errors_of_product(constrain):
    """Returns the relative errors of a product in EasyLM's layout on 2x2x2 devices, and of its gradient."""
    x, w = FIRST, SECOND
    layout, _ = splits = easylm_layouts()

    def loss(x, w):
        result = constrain(x @ w, layout)
        return jnp.sum(result**2), result

    derive = jax.jit(jax.grad(loss, has_aux=True), in_shardings=splits)
    gradient, result = derive(x.astype(np.float32), w.astype(np.float32))
    pairs = (result, x @ w), (gradient, 2 * (x @ w) @ w.T)
    return [float(np.abs(np.asarray(got) - right).max() / np.abs(right).max()) for got, right in pairs]


def test_product_over_three_mesh_axes_is_right():
    with installed():
        assert errors_of_product(jax.lax.with_sharding_constraint) == [0, 0]
        assert errors_of_product(with_sharding_constraint) == [0, 0]


def test_product_over_three_mesh_axes_is_wrong_in_jax():
    """As soon as this fails, `shard_map_helpers.with_sharding_constraint` can go."""
    assert min(errors_of_product(jax.lax.with_sharding_constraint)) > 0.5


def error_of_result(jit, in_shardings, out_shardings):
    """Returns the relative error of the product where only the layout of the result asks for the split."""
    multiply = jit(lambda x, w: {"product": x @ w}, in_shardings=tuple(in_shardings), out_shardings=out_shardings)
    got = multiply(FIRST.astype(np.float32), SECOND.astype(np.float32))["product"]
    assert got.sharding.spec == SPECS[0]
    return float(np.abs(np.asarray(got) - FIRST @ SECOND).max() / np.abs(FIRST @ SECOND).max())


def test_result_over_three_mesh_axes_is_right():
    layouts = easylm_layouts()
    with installed():
        assert error_of_result(jax.jit, layouts, layouts[0]) == 0
    with layouts[0].mesh:
        assert error_of_result(pjit, SPECS, {"product": SPECS[0]}) == 0
    with mesh_scope(layouts[0].mesh):
        assert error_of_result(jit_in_layout, SPECS, SPECS[0]) == 0
    with jax.set_mesh(layouts[0].mesh):
        assert error_of_result(jit_in_layout, SPECS, SPECS[0]) == 0
    with installed(), jax.set_mesh(layouts[0].mesh):
        assert error_of_result(lambda fun, **how: jax.jit(**how)(fun), SPECS, SPECS[0]) == 0


def test_result_over_three_mesh_axes_is_wrong_in_jax():
    layouts = easylm_layouts()
    assert error_of_result(jax.jit, layouts, layouts[0]) > 0.5


def test_a_function_that_is_jitted_again_is_traced_once():
    traced, x, (layout, _) = [], np.ones((4, 8, 16), np.float32), easylm_layouts()

    def double(x):
        traced.append(1)
        return 2 * x

    with installed():
        for _ in range(2):
            jax.jit(double, out_shardings=layout)(x)
    assert traced == [1]
    with mesh_scope(layout.mesh):
        for spec, traces in ((SPECS[0], 2), (P("dp"), 3)):
            for _ in range(2):
                jit_in_layout(double, out_shardings=spec)(x)
            assert len(traced) == traces


def test_migrated_layouts_need_no_mesh_of_the_helpers():
    x = np.ones((4, 8, 16), np.float32)
    with jax.set_mesh(easylm_layouts()[0].mesh):
        for spec in (P("dp"), SPECS[0]):
            assert jit_in_layout(lambda x: 2 * x, out_shardings=spec)(x).sharding.spec == spec
    with pytest.raises(RuntimeError, match="non-empty mesh"):
        jit_in_layout(lambda x: 2 * x, out_shardings=P("dp"))(x)


def test_layouts_of_other_trees_are_left_to_jax():
    layout, _ = easylm_layouts()
    with pytest.raises(ValueError, match="out_shardings"):
        jit_in_layout(lambda x: {"a": x}, out_shardings=[layout])(np.ones((4, 8, 16), np.float32))


def test_one_step_is_enough_for_two_axes_or_none_joined():
    def jaxpr(mesh, spec):
        layout = NamedSharding(mesh, spec)
        return str(jax.make_jaxpr(lambda x: with_sharding_constraint(x, layout))(np.ones((8, 8))))

    three = Mesh(devices(2, 2, 2), ("dp", "fsdp", "mp"))
    two = Mesh(devices(4, 2, 1), ("dp", "fsdp", "mp"))
    steps = [jaxpr(mesh, spec).count("sharding_constraint[") for mesh, spec in (
        (three, P(("dp", "fsdp"), "mp")), (three, P("dp", "mp")), (two, P(("dp", "fsdp"), "mp")))]  # fmt: skip
    assert steps == [2, 1, 1]
