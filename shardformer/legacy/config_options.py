"""Puts options of `jax.config` back: they are set and read, and mean nothing; setting one warns, once."""

import contextlib
import functools
import types
import warnings
from collections.abc import Callable
from typing import Any

import jax

from shardformer.legacy.removed_options import REMOVED_OPTIONS

# JAX still has this one, where a backend of that time ("xla", "tpu_driver") now is a platform that does not exist.
CHANGED = {"jax_xla_backend"}


class _Flags:
    """`jax.config.FLAGS`: the options as attributes."""

    def __getattr__(self, name: str):
        return _read(name)

    def __setattr__(self, name: str, value):
        jax.config.update(name, value)


FLAGS = _Flags()
flags = types.SimpleNamespace(FLAGS=FLAGS)


def enable_omnistaging() -> None:
    _ignored("omnistaging_enabled")


def put_back(stack: contextlib.ExitStack) -> None:
    """Makes `jax.config` take the removed options, until `stack` closes."""
    known = jax.config.values
    missing = {name: value for name, value in REMOVED_OPTIONS.items() if name not in known or name in CHANGED}
    _set(stack, "update", _ignoring(missing, jax.config.update))
    _set(stack, "read", lambda name: missing[name] if name in missing else _today_read(name))
    _set(stack, "enable_omnistaging", enable_omnistaging)
    for name, value in {**missing, "FLAGS": FLAGS, "flags": flags}.items():
        if not hasattr(jax.config, name):
            _set(stack, name, value)


_today_read = jax.config.read


def _set(stack: contextlib.ExitStack, name: str, value: Any) -> None:
    stack.callback(delattr, jax.config, name)
    setattr(jax.config, name, value)


def _ignoring(missing: dict[str, Any], update: Callable) -> Callable:
    @functools.wraps(update)
    def update_or_ignore(name: str, val: Any) -> None:
        if name in missing:
            _ignored(name)
            missing[name] = val
            setattr(jax.config, name, val)
        else:
            update(name, val)

    return update_or_ignore


def _read(name: str) -> Any:
    return getattr(jax.config, name)


@functools.cache
def _ignored(name: str) -> None:
    warnings.warn(f"jax.config has no option {name} any more: setting it does nothing; delete the line", stacklevel=3)
