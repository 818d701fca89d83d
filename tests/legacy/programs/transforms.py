"""Programs about transforms of xmap, xmaps within xmaps, serial loops and donation."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .arguments import BY_MESH, SUM, on_mesh
from .registry import floats, ints, maps, mesh, on, plus, program, rows, table, twice, xmap
from .resources import environment_shape

# Transforms of xmap and xmap within xmap -----------------------------------------------------------------------------


def summed(spec=("i", ...), out=("i", ...), **keywords):
    return xmap(lambda x: lax.psum(x, "i") + x, list(spec), list(out), **keywords)


@program
def transform_lower_and_compile():
    with mesh(x=4):
        return summed(**BY_MESH).lower(ints(8, 3)).compile()(ints(8, 3))


@program
def transform_eval_shape():
    with mesh(x=4):
        shape = jax.eval_shape(summed(**BY_MESH), jax.ShapeDtypeStruct((8, 3), jnp.float32))
    return np.zeros(shape.shape, shape.dtype)


@program
def transform_make_jaxpr():
    with mesh(x=4):
        result = jax.make_jaxpr(summed(**BY_MESH))(ints(8, 3)).out_avals[0]
    return np.zeros(result.shape, result.dtype)


@program
def transform_linearize():
    value, push = jax.linearize(xmap(lambda x: x * x, ["i", ...], ["i", ...]), floats(4, 3))
    return value, push(floats(4, 3))


def nest(inner_body, inner_spec=("j", ...), outer=None, inner=None, argument=None):
    with mesh(x=4, y=2):
        inner_map = xmap(inner_body, list(inner_spec), list(inner_spec), axis_resources=inner or {})
        return xmap(inner_map, ["i", ...], ["i", ...], axis_resources=outer or {})(
            ints(4, 2, 3) if argument is None else argument
        )


def jitted(function, *arguments, **sizes):
    with on(sizes):
        return jax.jit(function)(*arguments)


def jitted_step(x):
    return x - jax.grad(lambda x: jnp.sum(xmap(lambda x: x**3, ["i", ...], ["i", ...], **BY_MESH)(x)))(x) / 8


class Scale:
    """A function that is an object, with a method; equal to others, and so without a hash."""

    def __init__(self, by):
        self.by = by

    def __eq__(self, other):
        return isinstance(other, Scale)

    def __call__(self, x):
        return x * self.by

    def summed(self, x):
        return lax.psum(x * self.by, "i")


@program
def function_changes_its_dtype():
    function = xmap(lambda x: x / 2 if x.dtype == jnp.float32 else x + 1, ["i", ...], ["i", ...])
    return function(ints(4, 2)), function(floats(4, 2)), function(ints(4, 2))


@program
def function_of_the_same_name():
    return [xmap(lambda x, by=by: x * by, ["i", ...], ["i", ...])(ints(4, 2)) for by in range(3)]


BOTH = lambda x: lax.psum(x, ("i", "j")) + lax.psum(x, "j") + x

table(
    transform_vmap=lambda: jax.vmap(summed())(ints(2, 4, 3)),
    transform_vmap_axis_1=lambda: jax.vmap(summed(), in_axes=1, out_axes=2)(ints(4, 2, 3)),
    transform_vmap_of_mesh=lambda: on_mesh(lambda: jax.vmap(summed(**BY_MESH))(ints(2, 8, 3))),
    transform_vmap_unmapped_argument=lambda: jax.vmap(
        xmap(plus, (["i", ...], ["i", ...]), ["i", ...]), in_axes=(0, None)
    )(ints(2, 4, 3), ints(4, 3)),
    transform_vmap_named_axis=lambda: jax.vmap(
        xmap(lambda x: lax.psum(x, ("i", "k")), ["i", ...], [...]), axis_name="k"
    )(ints(2, 4, 3)),
    transform_jvp=lambda: jax.jvp(xmap(lambda x: x * x, ["i", ...], ["i", ...]), (floats(4, 3),), (floats(4, 3),)),
    transform_vjp=lambda: jax.vjp(xmap(lambda x: x * x, ["i", ...], {1: "i"}), floats(4, 3))[1](floats(3, 4)),
    transform_jit_vmapped=lambda: jitted(summed(), ints(4, 3)),
    transform_jit_mesh=lambda: jitted(summed(**BY_MESH), ints(4, 3), x=4),
    transform_jit_tiled=lambda: jitted(summed(**BY_MESH), ints(16, 3), x=4),
    transform_jit_unused_axis=lambda: jitted(summed(**BY_MESH), ints(4, 3), x=4, y=2),
    transform_jit_part_of_jit=lambda: jitted(lambda x: summed(**BY_MESH)(x + 1) * 2, ints(8, 3), x=4),
    transform_jit_index=lambda: jitted(
        xmap(lambda: lax.axis_index("i"), (), ["i"], axis_sizes={"i": 16}, **BY_MESH), x=4
    ),
    transform_jit_grad=lambda: jitted(jitted_step, floats(8, 3), x=4),
    transform_scan_over_xmap=lambda: lax.scan(lambda c, _: (summed()(c), None), ints(8, 3), None, length=2)[0],
    transform_of_jit=lambda: rows(jax.jit(twice), ints(4, 3)),
    function_bound_method=lambda: rows(Scale(3).summed, ints(4, 3)),
    function_object=lambda: (rows(Scale(3), ints(4, 3)), rows(Scale(4), ints(4, 3))),
    function_partial=lambda: rows(functools.partial(plus, ints(3)), ints(4, 3)),
    transform_called_twice=lambda: (lambda f: (f(ints(4, 3)), f(ints(2, 2))))(summed()),
    nested_vmapped=lambda: nest(BOTH),
    nested_outer_on_mesh=lambda: nest(BOTH, outer={"i": "x"}),
    nested_inner_on_mesh=lambda: nest(BOTH, inner={"j": "y"}),
    nested_both_on_mesh=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "y"}),
    nested_both_tiled=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "y"}, argument=ints(8, 4, 3)),
    nested_axis_index=lambda: nest(lambda x: x + lax.axis_index("i") * 10 + lax.axis_index("j"), outer={"i": "x"}),
    nested_local=lambda: nest(twice, outer={"i": "x"}, inner={"j": "y"}),
    nested_same_resource=lambda: nest(BOTH, outer={"i": "x"}, inner={"j": "x"}, argument=ints(4, 4, 3)),
    nested_same_name=lambda: nest(lambda x: lax.psum(x, "i"), inner_spec=["i", ...]),
    nested_inner_second_axis=lambda: nest(lambda x: lax.psum(x, "j") + x, inner_spec=[None, "j"], outer={"i": "x"}),
    nested_groups=lambda: nest(
        lambda x: lax.psum(x, "j", axis_index_groups=[[0, 1]]) + lax.psum(x, "i", axis_index_groups=[[0, 1], [2, 3]]),
        outer={"i": "x"},
        inner={"j": "y"},
    ),
    nested_grad_inside=lambda: nest(
        jax.grad(lambda x: jnp.sum(lax.psum(x, ("i", "j")) * x)), outer={"i": "x"}, argument=floats(4, 2, 3)
    ),
)

# Serial loops --------------------------------------------------------------------------------------------------------


def looped(body, length, size=8):
    return rows(body, ints(size, 3), axis_resources={"i": maps().SerialLoop(length)})


def shared_loops(first, second):
    body = xmap(lambda x, y: x * 10 + y, (["i"], ["j"]), ["i", "j"], axis_resources={"i": first, "j": second})
    return body(ints(4), ints(6))


@program
def loop_named_for_two_axes():
    with maps().serial_loop("l", 2):
        return shared_loops("l", "l")


@program
def loop_on_mesh_axis():
    with mesh(x=2):
        return rows(twice, ints(8, 3), axis_resources={"i": ("x", maps().SerialLoop(2))})


@program
def loop_named():
    with maps().serial_loop("l", 4):
        return rows(twice, ints(8, 3), axis_resources={"i": "l"}), environment_shape()


@program
def loop_named_beside_mesh():
    with mesh(x=2), maps().serial_loop("l", 4):
        body = xmap(plus, (["i", ...], ["j", ...]), ["i", "j", ...], axis_resources={"i": "l", "j": "x"})
        return body(ints(8, 3), ints(2, 3))


table(
    loop_local=lambda: looped(twice, 4),
    loop_of_two_axes=lambda: shared_loops(maps().SerialLoop(2), maps().SerialLoop(2)),
    loop_shared_by_two_axes=lambda: (lambda loop: shared_loops(loop, loop))(maps().SerialLoop(2)),
    loop_of_one=lambda: looped(twice, 1),
    loop_index=lambda: looped(lambda x: lax.axis_index("i"), 4),
    loop_psum=lambda: looped(SUM, 4),
    loop_not_divisible=lambda: looped(twice, 3),
    loop_grad_inside=lambda: rows(
        jax.grad(lambda x: jnp.sum(x**3)), floats(8, 3), axis_resources={"i": maps().SerialLoop(4)}
    ),
    loop_other_axis_psum=lambda: xmap(
        lambda x: lax.psum(x, "j"), ["i", "j"], ["i"], axis_resources={"i": maps().SerialLoop(2)}
    )(ints(4, 3)),
    loop_equality=lambda: (
        np.bool_(maps().SerialLoop(2) == maps().SerialLoop(2)),
        np.int32(maps().SerialLoop(3).length),
    ),
)

# Donation ------------------------------------------------------------------------------------------------------------


def donated(donate, laid_out=False, **sizes):
    """The result, and which of the three arrays are gone afterwards; `laid_out`: they were results of xmap before."""
    state, batch = {"a": jnp.asarray(floats(4, 3)), "b": jnp.asarray(floats(4, 2))}, jnp.asarray(floats(4, 3) + 1)
    step = lambda s, x: ({"a": s["a"] + x, "b": s["b"] * 2}, lax.psum(x, "i"))
    with on(sizes):
        resources = {"i": "x"} if sizes else {}
        if laid_out:
            state, batch = rows(lambda s, x: (s, x), state, batch, axis_resources=resources)
        result = rows(step, state, batch, donate_argnums=donate, axis_resources=resources)
        jax.block_until_ready(result)
    return result, [np.bool_(array.is_deleted()) for array in (state["a"], state["b"], batch)]


table(
    donate_nothing=lambda: donated(()),
    donate_first=lambda: donated(0),
    donate_tuple=lambda: donated((0, 1)),
    donate_list=lambda: donated([1]),
    donate_laid_out=lambda: donated(0, laid_out=True, x=4),
    donate_laid_out_both=lambda: donated((0, 1), laid_out=True, x=2),
    donate_elsewhere=lambda: donated(0, x=4),
    donate_beyond_arguments=lambda: donated((5,)),
    donate_negative=lambda: donated((-1,)),
)
