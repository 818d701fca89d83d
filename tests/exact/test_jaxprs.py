"""Dead operations, also inside of those that JAX 0.12 expands only when it compiles."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import hijax
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from shardformer.exact import jaxprs

ROW = jax.ShapeDtypeStruct((4,), jnp.float32)
EXPANDED_LATER = getattr(hijax, "HiPrim", None) or hijax.VJPHiPrimitive  # the latter until JAX 0.11


class SinAndCos(EXPANDED_LATER):
    def __init__(self, array):
        self.in_avals, self.out_aval, self.params = (array,), (array, array), {}
        super().__init__()

    def expand(self, x):
        return jnp.sin(x), jnp.cos(x)


@pytest.fixture(autouse=True)
def _next_years_jax():
    """custom_vjp and checkpoint are then expanded later; before 0.12 the options are unfinished."""
    known = ("jax_custom_vjp3", "jax_remat3") if hasattr(hijax, "HiPrim") else ()
    before = {name: getattr(jax.config, name) for name in known}
    for name in known:
        jax.config.update(name, True)
    yield
    for name in known:
        jax.config.update(name, before[name])


def count(jaxpr, name):
    """Also in operations that are expanded later."""
    total = 0
    for equation in jaxpr.eqns:
        total += equation.primitive.name == name
        inner = jaxprs.bodies(equation) or [jaxprs.called(equation)]
        total += sum(count(each, name) for each in inner if each is not None)
    return total


def in_a_branch(function):
    return lambda x, _: lax.cond(x[0] > 0, function, function, x, None)


@pytest.mark.parametrize("call", [lambda f: f, jax.jit, jax.checkpoint, in_a_branch])
def test_a_dead_collective_is_dropped(call):
    @jax.custom_vjp
    def gather(x):
        return lax.all_gather(x, "dp", tiled=True)

    gather.defvjp(lambda x: (gather(x), None), lambda _, g: (lax.psum_scatter(g, "dp", tiled=True),))

    def forward(x):
        def layer(x, _):
            dead, alive = gather(x), gather(x + 1)
            return alive[:4], dead * 2

        return lax.scan(call(layer), x, None, length=3)[0]

    mesh = AbstractMesh((2,), ("dp",), axis_types=(AxisType.Auto,))
    mapped = jax.shard_map(forward, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))
    traced = jax.make_jaxpr(mapped)(jax.ShapeDtypeStruct((8,), jnp.float32)).jaxpr
    branches = 2 if call is in_a_branch else 1
    assert count(traced, "all_gather") == 2 * branches
    assert count(jaxprs.drop_dead(traced), "all_gather") == branches


def test_a_dead_result_of_two_is_not_computed():
    traced = jax.make_jaxpr(lambda x: SinAndCos(jax.typeof(x))(x)[0])(ROW).jaxpr
    smaller = jaxprs.drop_dead(traced)
    assert (count(traced, "cos"), count(smaller, "cos"), count(smaller, "sin")) == (1, 0, 1)
