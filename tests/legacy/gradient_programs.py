"""Random bodies of xmap with collectives, drawn from a seed, and their gradients; they run on jax 0.4.13 and today's.

A body transforms a vector `h` of 4 in some random steps, with a replicated matrix `w` and a split vector `v`. A step is
an operation, a collective, or a transform (scan, cond, remat, vmap, jit, custom_vjp) of further steps. In the last
groups, each body has an xmap of its own.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .programs.registry import on, xmap

PROGRAMS_IN_A_GROUP = 10
FIRST_NESTED_GROUP = 30
GROUPS = (*range(24), *range(FIRST_NESTED_GROUP, 36))  # 300 programs; the numbers seed their inputs
# The sizes of the named axes in their order, their mesh axes, and the mesh.
LAYOUTS = {
    "vmapped": ({"i": 8}, {}, {}),
    "mesh": ({"i": 8}, {"i": "x"}, {"x": 8}),
    "tiled": ({"i": 8}, {"i": "x"}, {"x": 4}),
    "two axes": ({"i": 4, "j": 2}, {"i": "x", "j": "y"}, {"x": 4, "y": 2}),
    "unplaced inside": ({"i": 4, "j": 2}, {"i": "x"}, {"x": 4}),
    "unplaced outside": ({"j": 2, "i": 4}, {"i": "x"}, {"x": 4}),
}


class Draw:
    """The random choices of one program."""

    def __init__(self, seed, sizes, collectives_in_branches):
        self.random = np.random.RandomState(seed)
        self.sizes = sizes
        self.collectives_in_branches = collectives_in_branches

    def choose(self, options):
        return options[self.random.randint(len(options))]

    def axis(self):
        return self.choose(list(self.sizes))

    def axes(self):
        """A name, or all of them."""
        names = tuple(self.sizes)
        return self.choose([*names, names])

    def numbers(self, *shape):
        return self.random.uniform(-1, 1, shape).astype(np.float32)

    def steps(self, depth, collectives=True):
        kinds = [draw_operation, draw_operation]
        if collectives:
            kinds += [draw_collective, draw_collective, draw_custom_vjp]
        if depth:
            kinds += [draw_transform, draw_transform]
        drawn = [self.choose(kinds)(self, depth, collectives) for _ in range(self.random.randint(1, 4))]

        def run(h, w, v):
            for step in drawn:
                h = step(h, w, v)
            return h

        return run


# Operations of one instance -------------------------------------------------------------------------------------------


def draw_operation(draw, depth, collectives):
    numbers, axis = draw.numbers(4), draw.axis()
    return draw.choose(
        [
            lambda h, w, v: jnp.sin(h * numbers + v),
            lambda h, w, v: jnp.tanh(w @ h),
            lambda h, w, v: h * v + numbers,
            lambda h, w, v: h * (1 + lax.axis_index(axis)).astype(h.dtype) / 4,
            lambda h, w, v: jax.nn.softmax(h) + h * h / 4,
            lambda h, w, v: h[np.array([2, 0, 3, 1])] + jnp.sort(h) / 2,
            lambda h, w, v: convolve(h, w, 1),
            lambda h, w, v: convolve(h, w, 4),
        ]
    )


def convolve(h, w, width):
    """The pairs of h as channels of two positions: a kernel of one position, or one as large as the input."""
    if width == 1:
        inputs, kernel, padding = h.reshape(1, 2, 2), w[:2, :2].reshape(1, 2, 2), "SAME"
    else:
        inputs, kernel, padding = h.reshape(1, 4, 1), w.reshape(4, 1, 4), "VALID"
    return lax.conv_general_dilated(inputs, kernel, (1,), padding, dimension_numbers=("NWC", "WIO", "NWC")).reshape(4)


# Collectives ----------------------------------------------------------------------------------------------------------


def draw_collective(draw, depth, collectives):
    axis, axes = draw.axis(), draw.axes()
    size = draw.sizes[axis]
    weights = draw.numbers(size, 4)
    ring = [(k, (k + 1) % size) for k in range(size)]
    return draw.choose(
        [
            lambda h, w, v: lax.psum(h, axes) / 8 + h,
            lambda h, w, v: lax.psum(h * v, axis) / 4,
            lambda h, w, v: lax.pmean(jnp.sin(h), axes) * v,
            lambda h, w, v: h - lax.pmax(lax.stop_gradient(h * h), axis),  # 0.4.13 is wrong for negative numbers
            lambda h, w, v: jnp.sum(lax.all_gather(h, axis) * weights, 0),
            lambda h, w, v: lax.all_gather(h, axis, tiled=True)[1:5] + h,
            lambda h, w, v: lax.ppermute(h, axis, ring) + h / 2,
            lambda h, w, v: lax.psum_scatter(weights * h, axis),
            lambda h, w, v: lax.psum_scatter((weights * h).reshape(-1), axis, tiled=True),
            lambda h, w, v: jnp.sum(lax.all_to_all(weights * h, axis, 0, 0) * weights[:, ::-1], 0),
            lambda h, w, v: h * lax.psum(1, axes) / 8,
        ]
    )


def draw_custom_vjp(draw, depth, collectives):
    """A function with a collective in its forward pass, in its backward pass, or in both."""
    axis = draw.axis()
    forward, backward = draw.choose(
        [
            (lambda h: h, lambda g: lax.psum(g, axis)),
            (lambda h: lax.psum(h, axis), lambda g: g),
            (lambda h: lax.pmean(h, axis), lambda g: lax.psum(g, axis) / 2),
            (lambda h: h * 2, lambda g: lax.pmean(g, axis)),
        ]
    )

    @jax.custom_vjp
    def f(h):
        return forward(h)

    f.defvjp(lambda h: (forward(h), h), lambda h, g: (backward(g) * jnp.cos(h),))
    return lambda h, w, v: f(h) / 2


# Transforms -----------------------------------------------------------------------------------------------------------


def draw_transform(draw, depth, collectives):
    return draw.choose([draw_scan, draw_cond, draw_remat, draw_vmap, draw_jit])(draw, depth - 1, collectives)


def draw_scan(draw, depth, collectives):
    f, numbers = draw.steps(depth, collectives), draw.numbers(2, 4)

    def scan(h, w, v):
        last, outputs = lax.scan(lambda h, x: (jnp.sin(f(h * x, w, v)), h * x), h, numbers)
        return last + outputs[0]

    return scan


def draw_cond(draw, depth, collectives):
    """With collectives in its branches, all instances take the same branch."""
    inside = collectives and draw.collectives_in_branches
    true, false, names = draw.steps(depth, inside), draw.steps(depth, inside), tuple(draw.sizes)

    def cond(h, w, v):
        total = lax.psum(jnp.sum(h), names) if inside else jnp.sum(h)
        return lax.cond(total > 0.1, true, false, h, w, v)

    return cond


def draw_remat(draw, depth, collectives):
    return jax.checkpoint(draw.steps(depth, collectives))


def draw_vmap(draw, depth, collectives):
    f, numbers = draw.steps(depth, collectives), draw.numbers(3, 4)
    return lambda h, w, v: jnp.sum(jax.vmap(lambda x: f(h * x, w, v))(numbers), 0)


def draw_jit(draw, depth, collectives):
    return jax.jit(draw.steps(depth, collectives))


def draw_xmap(draw, depth, collectives):
    """An xmap within the body; no collective is over its own axis: 0.4.13 differentiates these wrongly from outside."""
    f, numbers = draw.steps(depth, collectives), draw.numbers(3, 4)

    def instance(x, h, w, v):
        return f(h * x, w, v) * (1 + lax.axis_index("inner")).astype(h.dtype) / 2

    def nested(h, w, v):
        mapped = xmap(instance, in_axes=(["inner", ...], [...], [...], [...]), out_axes=["inner", ...])
        return jnp.sum(mapped(numbers, h, w, v), 0)

    return nested


# Programs -------------------------------------------------------------------------------------------------------------


def layout_of(group):
    return list(LAYOUTS)[group % len(LAYOUTS)]


def draw_body(seed, group):
    """Returns the body of one program: (x, w, v) -> the results, and whether each of them is split over the axes."""
    sizes = LAYOUTS[layout_of(group)][0]
    draw = Draw(seed, sizes, collectives_in_branches=group // len(LAYOUTS) % 3 == 2)
    f, names = draw_steps_of_body(draw, group), tuple(sizes)
    numbers, reduced, order = draw.numbers(4), draw.random.randint(3), draw.random.randint(4)

    def loss(x, w, v):
        h = f(x, w, v)
        unused = h * 3
        return jnp.sum(jnp.cos(h) * numbers), (h, {"unused": unused})

    def body(x, w, v):
        (value, (aux, _)), gradients = jax.value_and_grad(loss, (0, 1, 2), has_aux=True)(x, w, v)
        if order == 0:  # a second derivative
            gradients = jax.jvp(jax.grad(lambda x: loss(x, w, v)[0]), (x,), (jnp.cos(x),))
        if reduced == 0:
            return lax.pmean(value, names), lax.psum(gradients, names)
        return value, gradients, aux

    return body, reduced != 0


def draw_steps_of_body(draw, group):
    if group < FIRST_NESTED_GROUP:
        return draw.steps(2)
    before, nested, after = draw.steps(0), draw_xmap(draw, 2, True), draw.steps(0)
    return lambda h, w, v: after(nested(before(h, w, v), w, v), w, v)


def call_now(function, *arguments):
    return function(*arguments)


def run_programs(seeds, group, resources=True, call=call_now):
    """Returns the arrays of each program; all of them are one xmapped function, which `call` runs."""
    sizes, placed, shape = LAYOUTS[layout_of(group)]
    bodies = [draw_body(seed, group) for seed in seeds]
    random = np.random.RandomState(group)
    x, w, v = (
        random.uniform(-1, 1, s).astype(np.float32) for s in ((*sizes.values(), 4), (4, 4), (*sizes.values(), 4))
    )
    split = [*sizes, ...]
    mapped = xmap(
        lambda x, w, v: [body(x, w, v) for body, _ in bodies],
        in_axes=(split, [...], split),
        out_axes=[split if is_split else [...] for _, is_split in bodies],
        axis_resources=placed if resources else {},
    )
    with on(shape):
        results = call(mapped, x, w, v)
    return [[np.asarray(leaf) for leaf in jax.tree_util.tree_leaves(result)] for result in results]


def summarize(arrays):
    """Returns for each array its largest value and four random sums, in one vector."""
    random = np.random.RandomState(0)
    sums = [
        (np.abs(array).max(), *(random.normal(size=(4, array.size)) @ array.ravel() / np.sqrt(array.size)))
        for array in arrays
    ]
    return np.array(sums, np.float64).ravel()


def make_psum_without_transpose():
    """Makes a psum whose backward pass sums over no instances: each gets its own gradient of a loss."""

    @functools.partial(jax.custom_vjp, nondiff_argnums=(1,))
    def psum(x, names):
        return original(x, names)

    original = jax.lax.psum
    psum.defvjp(lambda x, names: (original(x, names), None), lambda names, _, g: (g,))
    return psum
