"""with_sharding_constraint gives right products where XLA's are wrong: on CPU devices in a mesh of three axes."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import installed
from shardformer.legacy.pjit import with_sharding_constraint


def devices(*sizes: int):
    return np.array(jax.devices()).reshape(sizes)


def errors_of_product(constrain):
    """Returns the relative errors of a product in EasyLM's layout on 2x2x2 devices, and of its gradient."""
    mesh = Mesh(devices(2, 2, 2), ("dp", "fsdp", "mp"))
    x, w = np.arange(512).reshape(4, 8, 16) % 7 - 3, np.arange(512).reshape(16, 32) % 5 - 2  # float32 is exact
    layout = NamedSharding(mesh, P(("dp", "fsdp"), None, "mp"))
    splits = layout, NamedSharding(mesh, P("mp", "fsdp"))

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


def test_one_step_is_enough_for_two_axes_or_none_joined():
    def jaxpr(mesh, spec):
        layout = NamedSharding(mesh, spec)
        return str(jax.make_jaxpr(lambda x: with_sharding_constraint(x, layout))(np.ones((8, 8))))

    three = Mesh(devices(2, 2, 2), ("dp", "fsdp", "mp"))
    two = Mesh(devices(4, 2, 1), ("dp", "fsdp", "mp"))
    steps = [jaxpr(mesh, spec).count("sharding_constraint[") for mesh, spec in (
        (three, P(("dp", "fsdp"), "mp")), (three, P("dp", "mp")), (two, P(("dp", "fsdp"), "mp")))]  # fmt: skip
    assert steps == [2, 1, 1]
