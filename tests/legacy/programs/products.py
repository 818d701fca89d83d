"""Programs about pdot, xeinsum, pgather, named einsums and NamedShape, which left JAX with xmap."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from .collectives import LAYOUTS
from .registry import PROGRAMS, floats, ints, mesh, on, table, xmap

# A matrix product whose contracted axis k is named, under every layout of k ------------------------------------------


def contracted(body, layout, out=()):
    """The body over columns of [3, k] and rows of [k, 2], whose results have no named axis, or those of `out`."""
    size, sizes, _ = LAYOUTS[layout]
    resources = {"k": "x"} if sizes else {}
    with on(sizes):
        return xmap(body, ([None, "k"], ["k", None]), [*out, ...], axis_resources=resources)(
            floats(3, size), floats(size, 2)
        )


def outer(x, y):
    return lax.pdot(x, y, "k")


def inner(x, y):
    return lax.pdot(x[:2], y, "k", pos_contract=((0,), (0,)))


def weighted(function):
    """The sum of a function of both operands, times something that differs between the instances."""
    return lambda x, y: jnp.sum(function(x, y) * (1 + lax.axis_index("k")).astype(jnp.float32))


def outside(layout):
    size, sizes, _ = LAYOUTS[layout]
    with on(sizes):
        function = xmap(outer, ([None, "k"], ["k", None]), [...], axis_resources={"k": "x"} if sizes else {})
        return jax.grad(lambda x, y: jnp.sum(function(x, y) ** 2), (0, 1))(floats(3, size), floats(size, 2))


BODIES = {
    "pdot": (outer, ()),
    "pdot_of_positions_too": (inner, ()),
    "pdot_as_batch": (lambda x, y: lax.pdot(x[:2], y, (), pos_batch=((0,), (0,))), ("k",)),
    "pdot_precision": (lambda x, y: lax.pdot(x, y, ("k",), precision="highest"), ()),
    "pdot_grad": (jax.grad(weighted(outer), (0, 1)), ("k",)),
    "pdot_jvp": (lambda x, y: jax.jvp(outer, (x, y), (2 * x, 3 * y)), ()),
    "pdot_second_derivative": (lambda x, y: jax.jvp(jax.grad(weighted(outer), 0), (x, y), (x, y))[1], ("k",)),
    "pdot_in_scan": (
        lambda x, y: lax.scan(lambda carry, _: (carry + lax.pdot(x, y, "k"), None), jnp.zeros((3, 2)), None, 2)[0], ()),
    "xeinsum": (lambda x, y: lax.xeinsum("i{k},j{k}->ij", x, y), ()),
    "xeinsum_reduces": (lambda x, y: lax.xeinsum("i{k},j{k}->i", x, y), ()),
    "xeinsum_of_one": (lambda x, y: lax.xeinsum("i{k}->", x), ()),
    "xeinsum_keeps": (lambda x, y: lax.xeinsum("i{k},j{k}->ij{k}", x, y), ("k",)),
    "named_einsum": (lambda x, y: jnp.einsum("i{k},j{k}->ij", x, y), ()),
    "named_einsum_grad": (jax.grad(weighted(lambda x, y: jnp.einsum("i{k},j{k}->ij", x, y)), 1), ("k",)),
}  # fmt: skip
for name, (body, out) in BODIES.items():
    for layout in LAYOUTS:
        PROGRAMS[f"{name}_{layout}"] = functools.partial(contracted, body, layout, out)
for layout in LAYOUTS:
    PROGRAMS[f"outside_pdot_{layout}"] = functools.partial(outside, layout)


def gathered(axes, spec, out=(), **sizes):
    with on(sizes):
        return xmap(
            lambda source, index: lax_parallel().pgather(source, index, axes),
            (spec, [...]),
            [*out, ...],
            axis_resources={"i": "x"} if sizes else {},
        )(ints(4, 3, 2), ints(5) % 3)


def lax_parallel():
    """pgather stood in no public module, but in the one that all who used it took it from."""
    if hasattr(lax, "pgather"):
        return lax
    from jax._src.lax import parallel

    return parallel


def drawn(sampler, layout):
    size, sizes, resources = LAYOUTS[layout]
    body = lambda key: sampler(key, jax.core.NamedShape(3, i=size))
    with on(sizes):
        return xmap(body, [...], ["i", ...], axis_sizes={"i": size}, axis_resources=resources)(jax.random.PRNGKey(3))


table(
    tutorial_batch_matrix=lambda: xmap(
        lambda x, y: jnp.einsum("n{b,k},{k,m}->n{b,m}", x, y), [{0: "b", 2: "k"}, ["k", "m", ...]], {0: "b", 2: "m"}
    )(floats(4, 3, 2), floats(2, 5)),
    pgather_positions=lambda: gathered((0,), [None, "i", ...], ("i",)),
    pgather_named=lambda: gathered("i", ["i", ...]),
    pgather_named_on_mesh=lambda: gathered("i", ["i", ...], x=4),
    xeinsum_too_many=lambda: lax.xeinsum("i,i,i->i", *[floats(3)] * 3),
    xeinsum_unknown_result=lambda: lax.xeinsum("i,i->j", *[floats(3)] * 2),
    xeinsum_without_names=lambda: lax.xeinsum("bij,bjk->bik", floats(2, 3, 4), floats(2, 4, 5)),
    xeinsum_other_order=lambda: lax.xeinsum("ij,jk->ki", floats(3, 4), floats(4, 5)),
    named_shape_uniform_vmapped=lambda: drawn(jax.random.uniform, "vmapped"),
    named_shape_normal_mesh=lambda: drawn(jax.random.normal, "mesh"),
    named_shape_truncated_normal_tiled=lambda: drawn(
        lambda key, shape: jax.random.truncated_normal(key, -2, 2, shape), "tiled"
    ),
    named_shape_bernoulli_tiled=lambda: drawn(lambda key, shape: jax.random.bernoulli(key, 0.5, shape), "tiled"),
    named_shape_mismatch=lambda: xmap(
        lambda key: jax.random.uniform(key, jax.core.NamedShape(3, i=5)), [...], ["i", ...], axis_sizes={"i": 4}
    )(jax.random.PRNGKey(3)),
    named_shape_initializer=lambda: xmap(
        lambda key: jax.nn.initializers.variance_scaling(2.0, "fan_in", "uniform", in_axis="i", out_axis=0)(
            key, jax.core.NamedShape(3, 2, i=4)
        ),
        [...],
        ["i", ...],
        axis_sizes={"i": 4},
    )(jax.random.PRNGKey(3)),
    pdot_batched_on_mesh=lambda: batched_on_mesh(),
)


def batched_on_mesh():
    with mesh(x=4, y=2):
        return xmap(
            lambda x, y: lax.pdot(x, y, "k", pos_contract=((0,), (0,))),
            ({0: "b", 2: "k"}, {0: "b", 2: "k"}),
            ["b", ...],
            axis_resources={"b": "x", "k": "y"},
        )(floats(4, 3, 4), floats(4, 3, 4))
