"""Programs about derivatives, taken inside of the body and from outside."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .collectives import LAYOUTS, family
from .registry import PROGRAMS, floats, on, rows, table, xmap

# Autodiff inside the body --------------------------------------------------------------------------------------------


@jax.custom_vjp
def f_psum(x):
    return x


f_psum.defvjp(lambda x: (x, None), lambda _, g: (lax.psum(g, "i"),))


@jax.custom_vjp
def g_psum(x):
    return lax.psum(x, "i")


g_psum.defvjp(lambda x: (lax.psum(x, "i"), None), lambda _, g: (g,))


@jax.custom_vjp
def mean_backward(x):
    return x


mean_backward.defvjp(lambda x: (x, None), lambda _, g: (lax.pmean(g, "i"),))


@jax.custom_vjp
def scaled(x):
    return x * x


scaled.defvjp(lambda x: (x * x, x), lambda x, g: (g * x * 8,))


def weight():
    """A weight for every instance, so that no two of them have the same gradient."""
    return (lax.axis_index("i") + 1).astype(jnp.float32)


def scan_of_psums(x):
    step = lambda carry, _: (carry / 8 + lax.psum(carry * x, "i") / 16, jnp.sum(carry))
    carry, sums = lax.scan(step, x, None, length=3)
    return jnp.sum(carry) + jnp.sum(sums)


def while_of_psums(x):
    return lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] / 8 + lax.pmean(s[1], "i")), (0, x))


def cond_of_index(x):
    return lax.cond(lax.axis_index("i") % 2 == 0, lambda x: jnp.sum(x * x), lambda x: 3 * jnp.sum(x), x)


def megatron_layer(x):
    hidden = f_psum(x) * weight() / 8
    return jnp.sum(g_psum(hidden * hidden) + x)


@functools.partial(jax.checkpoint, prevent_cse=False)
def rematerialized(x):
    return jnp.sum(lax.psum(x * x * weight() / 8, "i") * x)


family(
    lambda size: floats(size, 3),
    grad_local=jax.grad(lambda x: jnp.sum(x * x)),
    grad_psum=jax.grad(lambda x: jnp.sum(lax.psum(x, "i") * x * weight())),
    grad_psum_alone=jax.grad(lambda x: jnp.sum(lax.psum(x, "i"))),
    grad_pmean=jax.grad(lambda x: jnp.sum(lax.pmean(x * x, "i")) * weight()),
    grad_named_sum=jax.grad(lambda x: jnp.sum(x * x, axis=("i", 0)) * weight()),
    grad_named_mean=jax.grad(lambda x: jnp.mean(x * x, axis=("i", 0)) * weight()),
    grad_all_gather=jax.grad(lambda x: jnp.sum(lax.all_gather(x, "i") * weight())),
    grad_all_gather_concatenated=jax.grad(lambda x: jnp.sum(lax.all_gather(x * x, "i", tiled=True)[2:9]) * weight()),
    grad_ppermute=jax.grad(lambda x: jnp.sum(x * lax.ppermute(x, "i", [(0, 1), (1, 2), (2, 5), (5, 0)])) * weight()),
    grad_custom_vjp=jax.grad(lambda x: jnp.sum(scaled(x) * lax.psum(x, "i"))),
    grad_f=jax.grad(lambda x: jnp.sum(f_psum(x) * weight())),
    grad_g=jax.grad(lambda x: jnp.sum(g_psum(x * weight()))),
    grad_f_and_g=jax.grad(megatron_layer),
    grad_remat=jax.value_and_grad(rematerialized),
    grad_scan=jax.grad(scan_of_psums),
    grad_cond=jax.grad(cond_of_index),
    while_loop=lambda x: while_of_psums(x)[1],
    jvp_psum=lambda x: jax.jvp(lambda x: lax.psum(x * x, "i"), (x,), (x * 2,)),
    vjp_psum=lambda x: jax.vjp(lambda x: lax.psum(x * weight(), "i"), x)[1](x),
    grad_of_argument=lambda x: jax.grad(lambda w: jnp.sum(lax.psum(x * w, "i") ** 2))(jnp.float32(2)),
)
family(
    lambda size: floats(size, size),
    grad_psum_scatter=jax.grad(lambda x: lax.psum_scatter(x * x, "i") * weight()),
    grad_psum_scatter_concatenated=jax.grad(lambda x: lax.psum_scatter(x * x, "i", tiled=True)[0] * weight()),
    grad_all_to_all_alone=jax.grad(lambda x: jnp.sum(lax.all_to_all(x, "i", 0, 0))),
    grad_all_to_all=jax.grad(lambda x: jnp.sum(lax.all_to_all(x * x, "i", 0, 0) * x) * weight()),
)
family(
    lambda size: floats(size, 2),
    ("vmapped", "tiled"),
    hessian_inside=jax.hessian(lambda x: jnp.sum(lax.psum(x * x, "i") * x)),
    jacobians_inside=lambda x: (jax.jacfwd(lambda x: lax.pmean(x, "i") * x)(x), jax.jacrev(lambda x: x * x)(x)),
    vmap_inside=lambda x: jax.vmap(lambda y: lax.psum(y, "i") + y)(jnp.stack([x, 2 * x])),
    jit_inside=lambda x: jax.jit(lambda y: lax.psum(y, "i") + y)(x),
    scan_inside=lambda x: lax.scan(lambda c, y: (c + lax.psum(y, "i"), c * y), jnp.zeros_like(x), jnp.stack([x, -x])),
    fori_inside=lambda x: lax.fori_loop(0, 3, lambda k, c: c / 2 + lax.pmean(c, "i"), x),
    cond_of_psum=lambda x: lax.cond(lax.psum(x, "i")[0] > 0, lambda x: lax.pmax(x, "i"), lambda x: -x, x),
    cond_divergent=lambda x: lax.cond(lax.axis_index("i") % 2 == 0, lambda x: lax.psum(x, "i"), lambda x: -x, x),
    switch_inside=lambda x: lax.switch(lax.axis_index("i") % 3, [lambda x: x, lambda x: -x, lambda x: x * 2], x),
    sort_inside=lambda x: (jnp.sort(x), jnp.argmax(x), jnp.cumsum(x)),
    dot_inside=lambda x: jnp.einsum("a,b->ab", x, lax.pmax(x, "i")),
    where_inside=lambda x: jnp.where(lax.axis_index("i") == 2, x, 0.0),
)

# Derivatives taken from outside --------------------------------------------------------------------------------------


def outside(body, layout, derive=jax.grad, out=("i", ...)):
    def loss(x):
        size = len(x)
        weights = (1 + np.arange(size, dtype=np.float32)) / 4
        result = rows(body, x, out=out, axis_resources=LAYOUTS[layout][2])
        return jnp.sum(result.reshape((size if "i" in out else 1, -1)).sum(1) * weights[: size if "i" in out else 1])

    sizes = LAYOUTS[layout][1]
    with on(sizes):
        return derive(loss)(floats(LAYOUTS[layout][0], 3))


OUTSIDE = {
    "local": lambda x: jnp.sin(x) * x,
    "psum": lambda x: lax.psum(x * x, "i"),
    "pmean": lambda x: lax.pmean(x * x, "i"),
    "all_gather": lambda x: lax.all_gather(x * x, "i"),
    "ppermute": lambda x: lax.ppermute(x * x, "i", [(0, 1), (1, 2), (2, 5)]),
    "custom_vjp": scaled,
    "grad_inside": jax.grad(lambda x: jnp.sum(x**3)),
    "remat": rematerialized,
}

for name, body in OUTSIDE.items():
    for layout in LAYOUTS:
        PROGRAMS[f"outside_{name}_{layout}"] = functools.partial(outside, body, layout)

for layout in LAYOUTS:
    reduced = functools.partial(outside, OUTSIDE["psum"], layout, out=[...])
    PROGRAMS[f"outside_reduced_{layout}"] = reduced


def times_psum(x):
    """Instance k holds x[k] * sum(x)."""
    return xmap(lambda r: r * lax.psum(r, "k"), ["k"], ["k"])(x)


GRADIENT_OF_PRODUCT = jax.grad(lambda x: jnp.sum(times_psum(x)))
POWERS = np.array([[1, 2, 4, 8], [1, 3, 9, 27]], np.float32)


def tangents(loss):
    return lambda x: jax.jvp(loss, (x,), (x * 2,))


def shared_weight(layout):
    """The gradient of an argument that is the same for every instance."""
    size, sizes, resources = LAYOUTS[layout]
    body = xmap(lambda w, x: jnp.tanh(x * w), ({}, ["i", ...]), ["i", ...], axis_resources=resources)
    with on(sizes):
        return jax.grad(lambda w: jnp.sum(body(w, floats(size, 3))))(floats(3))


table(
    outside_unmapped_weight_vmapped=lambda: shared_weight("vmapped"),
    outside_unmapped_weight_mesh=lambda: shared_weight("mesh"),
    outside_unmapped_weight_tiled=lambda: shared_weight("tiled"),
    outside_psum_56=lambda: jax.grad(lambda x: xmap(lambda x: lax.psum(x * x, "i"), ["i"], [])(x) * 4)(
        np.arange(8, dtype=np.float32)
    ),
    outside_product_with_psum=lambda: GRADIENT_OF_PRODUCT(POWERS[0]),
    # An outer xmap over rows: the gradient of the inner one inside of it, and that of both from outside.
    outside_product_with_psum_in_xmap=lambda: rows(GRADIENT_OF_PRODUCT, POWERS),
    outside_product_with_psum_of_nested=lambda: jax.grad(lambda x: jnp.sum(rows(times_psum, x)))(POWERS),
    outside_custom_vjp_with_psum=lambda: outside(f_psum, "vmapped"),
    outside_custom_vjp_with_pmean=lambda: outside(mean_backward, "vmapped"),
    outside_jitted_custom_vjp_with_psum=lambda: outside(jax.jit(g_psum), "vmapped"),
    outside_jvp_local=lambda: outside(OUTSIDE["local"], "mesh", tangents),
    outside_jvp_psum=lambda: outside(OUTSIDE["psum"], "tiled", tangents),
    outside_value_and_grad=lambda: outside(OUTSIDE["local"], "tiled", jax.value_and_grad),
    outside_hessian=lambda: outside(lambda x: x**3, "vmapped", jax.hessian),
)
