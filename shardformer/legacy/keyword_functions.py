"""Functions that still exist, with the keywords that they have lost."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp

from shardformer.legacy.migration.shard_map_helpers import in_joined_layouts
from shardformer.legacy.pjit import AUTO
from shardformer.legacy.pmapped_arguments import PjitFunction


def _renaming(function: Callable, **renamed: str | None) -> Callable:
    """`function`, which also accepts keywords by their old names; None: a keyword that means nothing any more."""

    @functools.wraps(function)
    def call(*args, **kwargs):
        for old, new in renamed.items():
            if old in kwargs:
                value = kwargs.pop(old)
                if new is not None:
                    kwargs[new] = value
        return function(*args, **kwargs)

    return call


reshape = _renaming(jnp.reshape, newshape="shape")
quantile = _renaming(jnp.quantile, interpolation="method")
percentile = _renaming(jnp.percentile, interpolation="method")
nanquantile = _renaming(jnp.nanquantile, interpolation="method")
nanpercentile = _renaming(jnp.nanpercentile, interpolation="method")
softmax = _renaming(jax.nn.softmax, initial=None)
log_softmax = _renaming(jax.nn.log_softmax, initial=None)
cond = _renaming(jax.lax.cond, linear=None)

_clip, _solve, _pure_callback, _checkpoint = jnp.clip, jax.scipy.linalg.solve, jax.pure_callback, jax.checkpoint
_jit, _where = jax.jit, jnp.where


@functools.wraps(_jit)
def jit(*args, **kwargs):
    if "fun" in kwargs:
        args = (kwargs.pop("fun"), *args)
    for side in ("in_shardings", "out_shardings"):
        if side in kwargs:
            kwargs[side] = jax.tree.map(lambda sharding: None if sharding is AUTO else sharding, kwargs[side])
    if not args:  # a decorator
        _jit(**kwargs)  # rejects wrong keywords
        return functools.partial(jit, **kwargs)
    if "out_shardings" in kwargs:
        args = in_joined_layouts(args[0], kwargs["out_shardings"]), *args[1:]
    return PjitFunction(_jit(*args, **kwargs))


@functools.wraps(_clip)
def clip(*args, **kwargs):
    names = {"a": "arr", "a_min": "min", "a_max": "max"}
    given = {names.get(name, name): value for name, value in kwargs.items() if name != "out"}
    if "arr" in given:
        args = (given.pop("arr"), *args)
    return _clip(*args, **given)


@functools.wraps(_where)
def where(*args, **kwargs):
    names = ("condition", "x", "y")[len(args) :]
    return _where(*args, *(kwargs.pop(name, None) for name in names), **kwargs)


@functools.wraps(_solve)
def solve(*args, sym_pos: bool = False, **kwargs):
    return _solve(*args, **(kwargs | ({"assume_a": "pos"} if sym_pos else {})))


@functools.wraps(_pure_callback)
def pure_callback(callback, result_shape_dtypes, *args, vectorized: bool = False, **kwargs):
    # Under vmap it called back for one element after the other, or for all at once; today a caller has to choose.
    kwargs.setdefault("vmap_method", "expand_dims" if vectorized else "sequential")
    return _pure_callback(callback, result_shape_dtypes, *args, **kwargs)


@functools.wraps(_checkpoint)
def checkpoint(*args, concrete: bool = False, **kwargs):
    if concrete:
        raise NotImplementedError(
            "jax.checkpoint(concrete=True) is gone: give the arguments that Python looks at in static_argnums"
        )
    return _checkpoint(*args, **kwargs)
