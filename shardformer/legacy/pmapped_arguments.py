"""`jax.jit` of a pmap's results and arrays on other devices: up to jax 0.4, the results went where the others were."""

import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from shardformer.legacy.pmap_shardings import is_of_a_pmap
from shardformer.legacy.relocation import relocate, replicated


class PjitFunction:
    """A jitted function to which the results of a pmap follow its other arguments; haiku asks for a type so called."""

    # `functools.wraps`, as jax.grad uses it, copies __dict__: the members of this function must stay out of that.
    __slots__ = ("__dict__", "__weakref__", "_jitted")

    def __init__(self, jitted: Any):
        self._jitted = jitted
        functools.update_wrapper(self, jitted)
        self.__wrapped__ = jitted.__wrapped__

    lower = property(operator.attrgetter("_jitted.lower"))
    trace = property(operator.attrgetter("_jitted.trace"))
    eval_shape = property(operator.attrgetter("_jitted.eval_shape"))
    clear_cache = property(operator.attrgetter("_jitted.clear_cache"))
    _cache_size = property(operator.attrgetter("_jitted._cache_size"))

    def __call__(self, *args, **kwargs):
        try:
            return self._jitted(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error) or not any(map(is_pmapped, jax.tree.leaves((args, kwargs)))):
                raise
            first = error
        args, kwargs = _gathered(args, kwargs)
        try:
            return self._jitted(*args, **kwargs)
        except ValueError:  # about arguments that the program did not give
            raise first from None
        finally:
            del first  # it refers to this frame, and so to the arrays

    def __get__(self, instance: Any, owner: type | None = None) -> Callable:
        return self if instance is None else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return repr(self._jitted)


def _gathered(args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """Returns the arguments with results of pmaps where the others are; without others, on the default device."""
    leaves = [leaf for leaf in jax.tree.leaves((args, kwargs)) if getattr(leaf, "committed", False)]
    others = [leaf for leaf in leaves if not is_pmapped(leaf)] or [jnp.zeros(())]
    target = replicated(others[0].sharding)

    def gather(argument):
        if not any(map(is_pmapped, jax.tree.leaves(argument))):
            return argument  # a static one may be known by its identity
        return jax.tree.map(lambda leaf: relocate(leaf, target) if is_pmapped(leaf) else leaf, argument)

    return tuple(map(gather, args)), {name: gather(argument) for name, argument in kwargs.items()}


def is_pmapped(leaf) -> bool:
    """Returns True for the result of a pmap, and for what was computed of one: it is spread over the pmap's devices."""
    return isinstance(leaf, jax.Array) and not isinstance(leaf, jax.core.Tracer) and is_of_a_pmap(leaf.sharding)
