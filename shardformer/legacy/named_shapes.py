"""`jax.core.NamedShape`, a shape with named axes, and the random samplers and the initializer that take one.

A sampler draws its positional shape once for each index along the named axes, from a key that is folded with the index.
"""

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp


class NamedShape(tuple):
    """Positional sizes, as a tuple, and the sizes of named axes next to them."""

    _named: dict[Any, int]

    def __new__(cls, *sizes: int, **named: int):
        shape = super().__new__(cls, sizes)
        shape._named = named
        return shape

    @property
    def positional(self) -> tuple[int, ...]:
        return tuple(self)

    @property
    def rank(self) -> int:
        return len(self) + len(self._named)

    @property
    def total(self) -> int:
        return math.prod(self) * math.prod(self._named.values())

    def size(self, axis: int | Hashable) -> int:
        return self[axis] if isinstance(axis, int) else self._named[axis]

    @property
    def names(self):
        return self._named.keys()

    def named_items(self):
        return self._named.items()

    def __eq__(self, other):
        return isinstance(other, tuple) and tuple(self) == tuple(other) and self._named == getattr(other, "_named", {})

    def __ne__(self, other):  # tuple has its own, which knows no names
        return not self == other

    def __hash__(self):
        return hash((tuple(self), frozenset(self._named.items())))

    def __repr__(self):
        return f"NamedShape({', '.join([*map(str, self), *(f'{name}={size}' for name, size in self._named.items())])})"


def as_named_shape(shape: Sequence[int]) -> NamedShape:
    return shape if isinstance(shape, NamedShape) else NamedShape(*shape)


def _taking_named_shapes(sampler: Callable) -> Callable:
    signature = inspect.signature(sampler)

    @functools.wraps(sampler)
    def sample(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        shape = given.get("shape")
        if isinstance(shape, NamedShape):
            given |= {"key": _fold_named_axes(given["key"], shape), "shape": shape.positional}
            return sampler(**given)
        return sampler(*args, **kwargs)

    return sample


def _fold_named_axes(key, shape: NamedShape):
    for name, size in shape.named_items():
        actual = jax.lax.axis_size(name)
        if actual != size:
            raise ValueError(f"The shape of axis {name} was specified as {size}, but it really is {actual}")
        key = jax.random.fold_in(key, jax.lax.axis_index(name))
    return key


bernoulli = _taking_named_shapes(jax.random.bernoulli)
normal = _taking_named_shapes(jax.random.normal)
truncated_normal = _taking_named_shapes(jax.random.truncated_normal)
uniform = _taking_named_shapes(jax.random.uniform)


_variance_scaling = jax.nn.initializers.variance_scaling  # before `install()` puts ours in its place


@functools.wraps(_variance_scaling)
def variance_scaling(scale, mode: Any, distribution: Any, in_axis=-2, out_axis=-1, batch_axis=(), *args, **kwargs):
    initialize = _variance_scaling(scale, mode, distribution, in_axis, out_axis, batch_axis, *args, **kwargs)
    default = args[0] if args else kwargs.get("dtype", jnp.float32)

    @functools.wraps(initialize)
    def init(key, shape, dtype=default, **options):
        if not isinstance(shape, NamedShape):
            return initialize(key, shape, dtype, **options)
        inward, outward, batch = (
            math.prod(map(shape.size, [axes] if isinstance(axes, (int, str)) else axes))
            for axes in (in_axis, out_axis, batch_axis)
        )
        fan_in, fan_out = shape.total / (outward * batch), shape.total / (inward * batch)
        fan = {"fan_in": fan_in, "fan_out": fan_out, "fan_avg": (fan_in + fan_out) / 2}[mode]
        return _sample_unit_variance(distribution, key, shape, dtype) * jnp.sqrt(scale / fan).astype(dtype)

    return init


def _sample_unit_variance(distribution: str, key, shape: NamedShape, dtype):
    if distribution == "normal":
        return normal(key, shape, dtype)
    if distribution == "uniform":
        return uniform(key, shape, dtype, -1) * jnp.sqrt(3).astype(dtype)
    if distribution == "truncated_normal":
        deviation = 0.87962566103423978  # of the standard normal distribution between -2 and 2
        return truncated_normal(key, -2, 2, shape, dtype) / jnp.asarray(deviation, dtype)
    raise ValueError(f"variance_scaling has the distributions normal, uniform, truncated_normal; got {distribution!r}")
