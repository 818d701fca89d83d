"""Random bodies of xmap in two forms: the function of one instance, and one of the arrays of all instances.

The second form has no named axis and no vmap: a loop runs each operation for one instance after the other, and a
collective is an operation on the gathered arrays. A body transforms a vector `h` of 4. Its constants are a replicated
matrix, a split vector, a replicated key of the new type and split keys of the old one.
"""

import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax, random

from . import instance_operations
from .gradient_programs import LAYOUTS, Draw
from .programs.registry import on, xmap

MODES = ("inside", "outside", "second")  # where the gradient is taken
GROUPS = tuple(range(3 * len(LAYOUTS)))


class Constants(NamedTuple):
    w: jax.Array  # [4, 4]
    v: jax.Array  # [4]
    new: jax.Array  # a key
    old: jax.Array  # uint32 [2]


class Step(NamedTuple):
    """(h, constants) -> h of one instance, and (h, constants, names) -> h of all; `names` are the first axes of h."""

    of_one: Callable
    of_all: Callable


# The form of all instances --------------------------------------------------------------------------------------------


def for_each(function, arrays, count: int):
    """Returns the function's result for one instance after the other; `count` axes number the instances."""
    leading = jax.tree.leaves(arrays)[0].shape[:count]
    flat = jax.tree.map(lambda x: x.reshape(-1, *x.shape[count:]), arrays)
    return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), lax.map(lambda each: function(*each), flat))


def index_along(axes, names, h):
    """Returns each instance's index along one or more axes, the first of them major."""
    return sum(
        lax.broadcasted_iota(jnp.int32, h.shape[: len(names)], names.index(axis))
        * int(np.prod([h.shape[names.index(after)] for after in axes[number + 1 :]]))
        for number, axis in enumerate(axes)
    )


def gather(x, axes, names):
    """Returns for each instance the values along the axes: [instances..., n, *values]."""
    positions = [names.index(axis) for axis in axes]
    gathered = jnp.moveaxis(x, positions, range(len(names) - len(axes), len(names)))
    gathered = gathered.reshape(*gathered.shape[: len(names) - len(axes)], -1, *x.shape[len(names) :])
    return jnp.broadcast_to(
        jnp.expand_dims(gathered, sorted(positions)),
        (*x.shape[: len(names)], *gathered.shape[len(names) - len(axes) :]),
    )


# Steps ----------------------------------------------------------------------------------------------------------------


class OperationDraw(Draw):
    def __init__(self, seed, group):
        super().__init__(seed, LAYOUTS[layout_of(group)][0], collectives_in_branches=True)
        # Outside of an xmap, the gradient of a custom_vjp with collectives is not defined: see differences.toml.
        self.gradient_is_inside = MODES[group // len(LAYOUTS)] != "outside"

    def steps(self, depth, collectives=True):
        kinds = [draw_operation, draw_operation]
        if collectives:
            kinds += [draw_collective, draw_collective] + [draw_custom_vjp] * self.gradient_is_inside
        if depth:
            kinds += [draw_transform, draw_transform]
        return chain([self.choose(kinds)(self, depth, collectives) for _ in range(self.random.randint(1, 4))])

    def inside(self, **axis):
        """Returns the choices of a body within an xmap over one more axis; they are drawn from the same numbers."""
        other = object.__new__(OperationDraw)
        other.__dict__ |= self.__dict__ | {"sizes": self.sizes | axis, "gradient_is_inside": False}
        return other


def chain(steps) -> Step:
    return Step(
        lambda h, c: functools.reduce(lambda h, step: step.of_one(h, c), steps, h),
        lambda h, c, names: functools.reduce(lambda h, step: step.of_all(h, c, names), steps, h),
    )


def draw_operation(draw, depth, collectives) -> Step:
    axis, numbers = draw.axis(), draw.numbers(4)
    operation = draw.choose(instance_operations.OPERATIONS)
    return Step(
        lambda h, c: operation(h, c, lax.axis_index(axis), numbers),
        lambda h, c, names: for_each(
            lambda h, c, index: operation(h, c, index, numbers), (h, c, index_along([axis], names, h)), len(names)
        ),
    )


def exchange(axes, of_one, of_gathered, payload=lambda h: h) -> Step:
    """A collective of each instance's payload: its result, and the same from what all instances along the axes have."""
    axes = axes if isinstance(axes, tuple) else (axes,)

    def of_all(h, c, names):
        gathered = gather(for_each(payload, (h,), len(names)), axes, names)
        return for_each(of_gathered, (gathered, index_along(axes, names, h)), len(names))

    return Step(lambda h, c: of_one(payload(h)), of_all)


def draw_collective(draw, depth, collectives) -> Step:
    axis, axes = draw.axis(), draw.axes()
    size = draw.sizes[axis]
    weights, chosen = draw.numbers(size, 4), draw.random.randint(size, size=4)
    order = draw.random.permutation(size)
    ring, still = [(k, (k + 1) % size) for k in range(size)], lax.stop_gradient

    def matrix(h):
        return weights * h

    return draw.choose(
        [
            exchange(axes, lambda h: lax.psum(h, axes) / 4, lambda g, k: g.sum(0) / 4),
            exchange(axes, lambda h: lax.pmean(h, axes), lambda g, k: g.sum(0) / g.shape[0]),
            exchange(axis, lambda h: lax.pmax(still(h), axis), lambda g, k: still(g).max(0)),
            exchange(axes, lambda h: h - lax.pmin(still(h), axes), lambda g, k: g[k] - still(g).min(0)),
            exchange(axis, lambda h: jnp.sum(h, axis=(axis, 0)) / 4 + h, lambda g, k: g.sum() / 4 + g[k]),
            exchange(axis, lambda h: jnp.mean(h, axis=(axis,)), lambda g, k: g.sum(0) / size),
            exchange(axis, lambda h: jnp.var(h, axis=(axis,)), lambda g, k: ((g - g.sum(0) / size) ** 2).sum(0) / size),
            exchange(
                axis,
                lambda h: jnp.sin(h) / (size + jnp.sum(jnp.sin(h), (axis,))),
                lambda g, k: jnp.sin(g[k]) / (size + jnp.sin(g).sum(0)),
            ),
            exchange(
                axis,
                lambda h: jax.nn.logsumexp(still(h), axis=(axis,)) + h,
                lambda g, k: jax.nn.logsumexp(still(g), 0) + g[k],
            ),
            exchange(axis, lambda h: (lax.all_gather(h, axis) * weights).sum(0), lambda g, k: (g * weights).sum(0)),
            exchange(axis, lambda h: lax.all_gather(h, axis, axis=1) @ weights[:, 0], lambda g, k: g.T @ weights[:, 0]),
            exchange(axis, lambda h: lax.all_gather(h, axis, tiled=True)[3:7], lambda g, k: g.reshape(-1)[3:7]),
            exchange(axis, lambda h: lax.pgather(h, chosen, (axis, 0)), lambda g, k: g.reshape(-1)[chosen]),
            exchange(axis, lambda h: lax.ppermute(h, axis, ring), lambda g, k: g[(k - 1) % size]),
            exchange(axis, lambda h: lax.pshuffle(h, axis, list(order)), lambda g, k: g[jnp.asarray(order)[k]]),
            exchange(axis, lambda m: lax.psum_scatter(m, axis), lambda g, k: g[:, k].sum(0), matrix),
            exchange(
                axis,
                lambda m: lax.psum_scatter(m.T, axis, scatter_dimension=1, tiled=True)[:, 0],
                lambda g, k: g[:, k].sum(0),
                matrix,
            ),
            exchange(
                axis,
                lambda m: lax.all_to_all(m, axis, 0, 1)[0] @ weights,
                lambda g, k: g[:, k].T[0] @ weights,
                matrix,
            ),
            exchange(
                axis,
                lambda m: lax.all_to_all(m, axis, 0, 1, tiled=True)[0, 2:6],
                lambda g, k: g[:, k].reshape(-1)[2:6],
                matrix,
            ),
            exchange(
                axis,
                lambda m: (lax.pswapaxes(m, axis, 0) * weights).sum(0),
                lambda g, k: (g[:, k] * weights).sum(0),
                matrix,
            ),
            exchange(  # its gradient is that of one instance's dot product: see the README
                axis,
                lambda h: still(lax.pdot(h, jnp.sin(h), axis, ((0,), (0,)))) + h,
                lambda g, k: still((g * jnp.sin(g)).sum()) + g[k],
            ),
            exchange(axes, lambda h: h * lax.psum(1, axes) / 8, lambda g, k: g[k] * g.shape[0] / 8),
        ]
    )


def draw_custom_vjp(draw, depth, collectives) -> Step:
    """A function with a collective in its forward pass, in its backward pass, or in both."""
    axis = draw.axis()
    same = exchange(axis, lambda h: h, lambda g, k: g[k])
    total = exchange(axis, lambda h: lax.psum(h, axis) / 2, lambda g, k: g.sum(0) / 2)
    mean = exchange(axis, lambda h: lax.pmean(h, axis), lambda g, k: g.sum(0) / g.shape[0])
    forward, backward = draw.choose([(same, total), (total, same), (mean, total), (same, mean)])

    def with_rule(forward, backward):
        function = jax.custom_vjp(forward)
        function.defvjp(lambda h: (forward(h), h), lambda h, g: (backward(g) * jnp.cos(h),))
        return function

    return Step(
        lambda h, c: with_rule(lambda h: forward.of_one(h, c), lambda g: backward.of_one(g, c))(h),
        lambda h, c, names: with_rule(
            lambda h: forward.of_all(h, None, names), lambda g: backward.of_all(g, None, names)
        )(h),
    )


# Transforms -----------------------------------------------------------------------------------------------------------


def draw_transform(draw, depth, collectives) -> Step:
    kinds = [draw_scan, draw_while, draw_cond, draw_remat, draw_vmap, draw_jit]
    if collectives and "inner" not in draw.sizes:
        kinds += [draw_xmap] * 2
    return draw.choose(kinds)(draw, depth - 1, collectives)


def both(step: Step, transform) -> Step:
    """The transform of either form, which is (h -> h) -> (h -> h)."""
    return Step(
        lambda h, c: transform(lambda h: step.of_one(h, c))(h),
        lambda h, c, names: transform(lambda h: step.of_all(h, c, names))(h),
    )


def draw_scan(draw, depth, collectives) -> Step:
    numbers, reverse = draw.numbers(2, 4), bool(draw.random.randint(2))

    def scan(f):
        def run(h):
            last, outputs = lax.scan(lambda h, x: (jnp.sin(f(h * x)), h * x), h, numbers, reverse=reverse)
            return last + outputs[0]

        return run

    return both(draw.steps(depth, collectives), scan)


def draw_while(draw, depth, collectives) -> Step:
    """A loop of two rounds for all instances, which has no gradient."""
    step = draw.steps(depth, collectives)

    def loop(h, c, f):
        still, kept = lax.stop_gradient((h, c))
        state = lax.while_loop(lambda s: s[0] < 2, lambda s: (s[0] + 1, jnp.sin(f(s[1], kept))), (0, still))
        return h + state[1]

    return Step(
        lambda h, c: loop(h, c, step.of_one),
        lambda h, c, names: loop(h, c, lambda h, c: step.of_all(h, c, names)),
    )


def draw_cond(draw, depth, collectives) -> Step:
    """All instances take the same branch."""
    true, false = draw.steps(depth, collectives), draw.steps(depth, collectives)
    axes = tuple(draw.sizes)
    total = exchange(axes, lambda h: lax.psum(h.sum(), axes), lambda g, k: g.sum())

    def of_all(h, c, names):
        sums = total.of_all(h, c, names)
        return lax.cond(
            sums.reshape(-1)[0] > 0.1, lambda h: true.of_all(h, c, names), lambda h: false.of_all(h, c, names), h
        )

    return Step(
        lambda h, c: lax.cond(total.of_one(h, c) > 0.1, lambda h: true.of_one(h, c), lambda h: false.of_one(h, c), h),
        of_all,
    )


def draw_remat(draw, depth, collectives) -> Step:
    return both(draw.steps(depth, collectives), jax.checkpoint)


def draw_jit(draw, depth, collectives) -> Step:
    return both(draw.steps(depth, collectives), jax.jit)


def draw_vmap(draw, depth, collectives) -> Step:
    step, numbers = draw.steps(depth, collectives), draw.numbers(3, 4)
    return Step(
        lambda h, c: jax.vmap(lambda x: step.of_one(h * x, c))(numbers).sum(0),
        lambda h, c, names: sum(step.of_all(h * x, c, names) for x in numbers),
    )


def draw_xmap(draw, depth, collectives) -> Step:
    """An xmap within the body, whose collectives are over its own axis and over those around it."""
    step, numbers = draw.inside(inner=3).steps(depth, collectives), draw.numbers(3, 4)

    def of_one(h, c):
        mapped = xmap(
            lambda x, h, c: step.of_one(h * x, c), in_axes=(["inner", ...], [...], [...]), out_axes=["inner", ...]
        )
        return mapped(numbers, h, c).sum(0)

    def of_all(h, c, names):
        count = len(names)
        repeated = jax.tree.map(lambda x: jnp.repeat(jnp.expand_dims(x, count), 3, count), c)
        return step.of_all(h[..., None, :] * numbers, repeated, (*names, "inner")).sum(-2)

    return Step(of_one, of_all)


# Programs -------------------------------------------------------------------------------------------------------------


def layout_of(group):
    return list(LAYOUTS)[group % len(LAYOUTS)]


def draw_arguments(seeds, group):
    """Returns for each program x, the matrix and the vector, then the keys that all programs share."""
    sizes = tuple(LAYOUTS[layout_of(group)][0].values())
    numbers = [np.random.RandomState(seed) for seed in seeds]
    arrays = [
        tuple(one.uniform(-1, 1, shape).astype(np.float32) for shape in ((*sizes, 4), (4, 4), (*sizes, 4)))
        for one in numbers
    ]
    old = numbers[0].randint(0, 2**31, (*sizes, 2)).astype(np.uint32)
    return arrays, random.key(group), old


def gradient(loss, mode):
    """Returns the loss's value and gradients, or the derivative of a gradient in a direction."""
    if mode == "second":
        return lambda *args: jax.jvp(jax.grad(lambda x: loss(x, *args[1:])), args[:1], (jnp.cos(args[0]),))
    return jax.value_and_grad(loss, (0, 1, 2))


def programs(seeds, group):
    """Returns the programs of a group as one function of the arguments in either form."""
    sizes, placed, shape = LAYOUTS[layout_of(group)]
    mode, names, split = MODES[group // len(LAYOUTS)], tuple(sizes), [*sizes, ...]
    steps, weights = [], []
    for seed in seeds:
        draw = OperationDraw(seed, group)
        steps.append(chain([draw.steps(1), draw_transform(draw, 2, True), draw.steps(0)]))
        weights.append(draw.numbers(*sizes.values(), 4))

    def loss_of_one(step, x, w, v, weight, new, old):
        return jnp.sum(jnp.cos(step.of_one(x, Constants(w, v, new, old))) * weight)

    def of_instances(arrays, new, old):
        """Each instance's loss, or its value and gradients."""

        def body(arrays, weights, new, old):
            results = []
            for step, own, weight in zip(steps, arrays, weights, strict=True):
                loss = functools.partial(loss_of_one, step, weight=weight, new=new, old=old)
                results.append((loss if mode == "outside" else gradient(loss, mode))(*own))
            return results

        one = (split, [...], split)
        mapped = xmap(body, in_axes=([one] * len(steps), split, [...], split), out_axes=split, axis_resources=placed)
        with on(shape):
            return mapped(arrays, weights, new, old)

    def mapped(arrays, new, old):
        if mode != "outside":
            return of_instances(arrays, new, old)

        def total(arrays):
            losses = of_instances(arrays, new, old)
            return sum(map(jnp.sum, losses)), losses

        gradients, losses = jax.grad(total, has_aux=True)(arrays)
        return list(zip(losses, gradients, strict=True))

    def of_all(arrays, new, old):
        return [
            differentiate_all(step, own, weight, new, old)
            for step, own, weight in zip(steps, arrays, weights, strict=True)
        ]

    def differentiate_all(step, own, weight, new, old):
        def copy(x):
            return jnp.broadcast_to(x, (*sizes.values(), *x.shape))

        def total(x, w, v):
            """The sum of all losses, and each of them."""
            losses = jnp.sum(jnp.cos(step.of_all(x, Constants(w, v, copy(new), old), names)) * weight, -1)
            return losses.sum(), losses

        x, w, v = own
        if mode == "second":
            return gradient(lambda *args: total(*args)[0], mode)(x, copy(w), v)
        if mode == "outside":  # one w for all instances
            gradients, losses = jax.grad(lambda x, w, v: total(x, copy(w), v), (0, 1, 2), has_aux=True)(x, w, v)
        else:
            gradients, losses = jax.grad(total, (0, 1, 2), has_aux=True)(x, copy(w), v)
        return losses, gradients

    return mapped, of_all
