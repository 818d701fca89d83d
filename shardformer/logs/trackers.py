"""Trackers of a run: any `module:function` that makes an observer."""

import importlib
from collections.abc import Callable

from shardformer.config import Config
from shardformer.errors import UsageError
from shardformer.logs.observers import Observer


def check_trackers(config: Config) -> None:
    """Raises UsageError for a tracker that cannot be imported, before a run starts."""
    if config.start.tracker:
        import_tracker(config.start.tracker)


def import_tracker(location: str) -> Callable[[dict], Observer]:
    """Returns the function of `tracker=module:function`; raises UsageError for a name that cannot be imported."""
    module, _, name = location.partition(":")
    try:
        function = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing a module may raise anything
        why = str(error) or type(error).__name__
        raise UsageError(f"tracker={location} cannot be imported: {why}; is its folder on PYTHONPATH?") from None
    if not callable(function):
        raise UsageError(f"tracker={location} is a {type(function).__name__}; name a function or a class")
    return function
