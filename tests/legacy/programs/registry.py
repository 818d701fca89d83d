"""Small xmap programs over everything that LEGACY.md lists; the same lines run on jax 0.4.13, 0.4.30 and on today's.

A program takes nothing and returns a pytree of arrays, or raises. Families repeat a body over layouts of its axes.
"""

import contextlib

import jax
import numpy as np
from jax.sharding import Mesh

PROGRAMS = {}


def program(function):
    PROGRAMS[function.__name__] = function
    return function


def table(**functions):
    PROGRAMS.update(functions)


def maps():
    from jax.experimental import maps

    return maps


def xmap(*arguments, **keywords):
    return maps().xmap(*arguments, **keywords)


def mesh(**sizes):
    shape = tuple(sizes.values())
    return Mesh(np.array(jax.devices()[: int(np.prod(shape))]).reshape(shape), tuple(sizes))


def within(context, function):
    with context:
        return function()


def on(sizes):
    return mesh(**sizes) if sizes else contextlib.nullcontext()


def ints(*shape):
    return np.arange(np.prod(shape), dtype=np.int32).reshape(shape)


def floats(*shape):
    return ((np.arange(np.prod(shape)) * 37 % 17 - 7) / 8).astype(np.float32).reshape(shape)


def twice(x):
    return x + x


def plus(x, y):
    return x + y


def rows(body, *arguments, out=("i", ...), **keywords):
    """The body over the leading axis of all arguments, named i."""
    return xmap(body, ["i", ...], list(out), **keywords)(*arguments)
