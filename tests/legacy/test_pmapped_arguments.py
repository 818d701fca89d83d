"""The jitted function of `legacy`: a pmap's results follow its other arguments, and all else is as jax has it."""

import copy
import functools
import weakref

import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.legacy import installed
from shardformer.legacy.pmapped_arguments import PjitFunction


@pytest.fixture(autouse=True)
def install():
    with installed():
        yield


def cube(x):
    return x**3


def on_device(number: int, x=1.0):
    return jax.device_put(jnp.float32(x), jax.devices()[number])


@pytest.mark.parametrize(
    ("transform", "expected"),
    [
        (jax.grad, 12.0),
        (jax.hessian, 12.0),
        (jax.value_and_grad, (8.0, 12.0)),
        (jax.checkpoint, 8.0),
        (lambda f: functools.wraps(f)(lambda x: f(x) + 1), 9.0),
        (lambda f: lambda x: f(x), 8.0),
    ],
)
def test_a_transformed_function_has_no_members_of_a_jitted_one(transform, expected):
    transformed = transform(jax.jit(cube))
    assert not hasattr(transformed, "trace")
    assert jax.jit(transformed).lower(2.0).compile()(2.0) == expected


def test_an_exported_gradient_is_one():
    exported = jax.export.export(jax.jit(jax.grad(jax.jit(cube))))(jnp.float32(2))
    assert exported.call(jnp.float32(2)) == 12


def test_a_jitted_function_is_what_jax_calls_one():
    cube.attribute = 5
    jitted = jax.jit(cube)
    assert isinstance(jitted, PjitFunction)
    assert isinstance(jitted, jax.stages.Wrapped)
    assert (jitted.__name__, jitted.attribute) == ("cube", 5)
    assert jitted.trace(2.0).jaxpr.out_avals[0].shape == ()
    assert jitted(2.0) == copy.deepcopy(jitted)(2.0) == 8
    assert jitted._cache_size() == 1
    jitted.clear_cache()
    assert jitted._cache_size() == 0
    del cube.attribute


def test_a_jitted_method_gets_its_instance():
    class Module:
        factor = 3

        @functools.partial(jax.jit, static_argnums=0)
        def scale(self, x):
            return self.factor * x

    assert Module().scale(2.0) == 6
    assert isinstance(Module.scale, PjitFunction)


def test_haiku_rejects_a_jitted_function():
    def net(x):
        return hk.get_parameter("w", (), init=jnp.ones) * x

    assert hk.transform(net).init(None, 1.0)
    with pytest.raises(ValueError, match=r"hk\.transform"):
        hk.transform(jax.jit(net))


class Known:
    """A tree without arrays, known by its identity."""

    def __init__(self, factor):
        self.factor = factor


jax.tree_util.register_pytree_node(Known, lambda known: ((), known.factor), lambda factor, _: Known(factor))


def test_static_arguments_stay_as_they_are():
    traced = []

    @functools.partial(jax.jit, static_argnames="known")
    def scaled(x, y, known):
        traced.append(known)
        return known.factor * x["x"].sum() + y

    known, mapped = Known(3), jax.pmap(lambda x: x)(jnp.arange(4.0))
    for _ in range(3):
        result = scaled({"x": mapped}, on_device(1), known=known)
    assert (float(result), result.devices()) == (19.0, {jax.devices()[1]})
    assert all(it is known for it in traced)


def test_the_error_is_about_the_arguments_of_the_program():
    mapped = jax.pmap(lambda x: x)(jnp.arange(4.0))
    with pytest.raises(ValueError, match="incompatible devices") as error:
        jax.jit(lambda a, b, c: a.sum() + b + c)(mapped, on_device(1), on_device(2))
    assert "with shape float32[4]" in str(error.value)
    assert "[0, 1, 2, 3]" in str(error.value)


def test_arguments_are_freed():
    mapped = jax.pmap(lambda x: x)(jnp.arange(4.0))
    gone = weakref.ref(mapped)
    assert jax.jit(lambda a, b: a.sum() + b)(mapped, on_device(1)) == 7
    del mapped
    assert gone() is None


@pytest.mark.parametrize(("first", "axes"), [(2, ("shared",)), (0, ("shared", "other")), (0, ("other", "shared"))])
def test_a_mesh_with_the_axis_of_a_pmap_is_the_programs(first, axes):
    def add(x, y):
        return x.sum() + y

    jax.pmap(lambda x: x, axis_name="shared")(jnp.arange(4.0))
    mesh = Mesh(np.array(jax.devices()[first : first + 2]).reshape([2, 1][: len(axes)]), axes)
    with pytest.raises(ValueError, match="incompatible devices"):
        jax.jit(add)(jax.device_put(jnp.ones(2), NamedSharding(mesh, P(axes))), on_device(7))
    chosen = jax.pmap(lambda x: x, axis_name="shared", devices=jax.devices()[4:7])(jnp.arange(2.0))
    assert jax.jit(add)(chosen, on_device(7)).devices() == {jax.devices()[7]}


def test_jit_checks_its_keywords_at_once():
    with pytest.raises(TypeError, match="static_argnum"):
        jax.jit(static_argnum=1)
    assert jax.jit(static_argnums=1)(pow)(2.0, 3) == 8


def test_jit_takes_the_function_by_its_name():
    assert jax.jit(fun=pow, static_argnums=1)(2.0, 3) == 8
