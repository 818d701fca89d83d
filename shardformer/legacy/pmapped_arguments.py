"""`jax.jit` of a pmap's results and arrays on other devices: up to jax 0.4, the results went where the others were."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding

from shardformer.legacy.pmap import AXES_OF_PMAPS
from shardformer.legacy.relocation import relocate, replicated


def moving_pmapped(jitted: Callable) -> Callable:
    """Returns a jitted function to which the results of a pmap follow its other arguments."""

    @functools.wraps(jitted)
    def call(*args, **kwargs):
        try:
            return jitted(*args, **kwargs)
        except ValueError as error:
            if "incompatible devices" not in str(error) or not any(map(is_pmapped, jax.tree.leaves((args, kwargs)))):
                raise
        args, kwargs = _gathered((args, kwargs))
        return jitted(*args, **kwargs)

    members = {name: getattr(jitted, name) for name in dir(jitted) if not name.startswith("__")}
    vars(call).update(members, __wrapped__=jitted.__wrapped__)  # type: ignore[attr-defined]  # functions have it
    return call


def _gathered(arguments: tuple) -> tuple:
    """Returns the arguments with results of pmaps where the others are; without others, on the default device."""
    leaves = [leaf for leaf in jax.tree.leaves(arguments) if getattr(leaf, "committed", False)]
    others = [leaf for leaf in leaves if not is_pmapped(leaf)] or [jnp.zeros(())]
    target = replicated(others[0].sharding)
    return jax.tree.map(lambda leaf: relocate(leaf, target) if is_pmapped(leaf) else leaf, arguments)


def is_pmapped(leaf) -> bool:
    """Returns True for the result of a pmap, and for what was computed of one: it is spread over the pmap's devices."""
    if not isinstance(leaf, jax.Array) or isinstance(leaf, jax.core.Tracer):
        return False
    sharding = leaf.sharding
    return isinstance(sharding, NamedSharding) and not AXES_OF_PMAPS.isdisjoint(sharding.mesh.axis_names)
