"""Programs about arguments that lie elsewhere than the mesh wants them, plain and under every transform."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from .registry import PROGRAMS, floats, mesh, table, xmap

ON_X, ON_Y = ({"axis_resources": {"i": axis}} for axis in ("x", "y"))


def on_device(number):
    return jax.device_put(floats(8, 3), jax.devices()[number])


def over_y():
    return jax.device_put(floats(8, 3), NamedSharding(mesh(x=4, y=2), PartitionSpec("y")))


def sines(x):
    return xmap(jnp.sin, ["i", ...], ["i", ...], **ON_X)(x)


def chain(x):
    return xmap(lambda x: x * x, ["i", ...], ["i", ...], **ON_Y)(sines(x))


def product(x, y):
    return xmap(lambda x, y: x * y + x, (["i", ...], ["i", ...]), ["i", ...], **ON_X)(x, y)


def total(function):
    return lambda *arguments: jnp.sum(function(*arguments))


def batched(function, x):
    return jax.vmap(function)(jnp.stack([x, 2 * x]))


TRANSFORMS = {
    "forward": lambda f, x: f(x),
    "grad": lambda f, x: jax.grad(total(f))(x),
    "value_and_grad": lambda f, x: jax.value_and_grad(total(f))(x),
    "jvp": lambda f, x: jax.jvp(f, (x,), (2 * x,)),
    "vjp": lambda f, x: jax.vjp(f, x)[1](3 * x)[0],
    "linearize": lambda f, x: jax.linearize(f, x)[1](2 * x),
    "vmap": batched,
    "vmap_of_axis_1": lambda f, x: jax.vmap(f, in_axes=1, out_axes=1)(jnp.stack([x, 2 * x], 1)),
    "checkpoint": lambda f, x: jax.grad(total(jax.checkpoint(f)))(x),
    "second_derivative": lambda f, x: jax.jvp(jax.grad(total(f)), (x,), (2 * x,))[1],
}
PLACES = {"device": functools.partial(on_device, 3), "other_axis": over_y}


def within_mesh(function):
    with mesh(x=4, y=2):
        return function()


def transformed(transform, function, make):
    return within_mesh(lambda: TRANSFORMS[transform](function, make()))


for name in TRANSFORMS:
    PROGRAMS[f"elsewhere_chain_{name}"] = functools.partial(transformed, name, chain, lambda: floats(8, 3))
    for place, make in PLACES.items():
        PROGRAMS[f"elsewhere_{place}_{name}"] = functools.partial(transformed, name, sines, make)


def closing_over(data):
    return lambda x: xmap(lambda x: x * data[0], ["i", ...], ["i", ...], **ON_X)(x)


unlaid_product = lambda x, y: xmap(lambda x, y: x * y + x, (["i", ...], ["i", ...]), ["i", ...])(x, y)

table(
    elsewhere_two_arguments=lambda: within_mesh(lambda: product(on_device(3), on_device(5))),
    elsewhere_two_arguments_grad=lambda: within_mesh(
        lambda: jax.grad(total(product), (0, 1))(on_device(3), on_device(5))
    ),
    elsewhere_other_argument_grad=lambda: within_mesh(
        lambda: jax.grad(lambda x: jnp.sum(product(x, on_device(3))))(floats(8, 3))
    ),
    elsewhere_closed_over=lambda: within_mesh(lambda: closing_over(on_device(3))(floats(8, 3))),
    elsewhere_closed_over_grad=lambda: within_mesh(lambda: jax.grad(total(closing_over(on_device(3))))(floats(8, 3))),
    elsewhere_argument_of_two_xmaps=lambda: within_mesh(
        lambda: jax.grad(lambda x: jnp.sum(sines(x) * chain(x)))(on_device(3))
    ),
    elsewhere_without_mesh=lambda: unlaid_product(on_device(3), on_device(5)),
    elsewhere_without_mesh_grad=lambda: jax.grad(lambda x: jnp.sum(unlaid_product(x, on_device(5))))(on_device(3)),
    elsewhere_step_by_step=lambda: within_mesh(
        lambda: functools.reduce(lambda x, _: x - jax.grad(total(sines))(x) / 8, range(2), on_device(3))
    ),
    elsewhere_numpy=lambda: within_mesh(lambda: np.asarray(jax.grad(total(sines))(floats(8, 3)))),
)
