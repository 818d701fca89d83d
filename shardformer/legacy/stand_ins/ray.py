"""ray in one process: a remote function runs where it is called. Actors are a pod's processes, and are rejected."""

from collections.abc import Callable
from typing import Any


def init(*_, **__) -> None:
    """Starts nothing: remote functions run in this process."""


def is_initialized() -> bool:
    return True


def shutdown(*_, **__) -> None:
    pass


class RemoteFunction:
    """A function that runs at the call of `remote`."""

    def __init__(self, function: Callable):
        self._function = function

    def remote(self, *arguments, **keywords) -> Any:
        return self._function(*arguments, **keywords)

    def options(self, **_) -> "RemoteFunction":
        return self


def remote(*decorated, **_) -> Any:
    """Decorates a function, with options or without."""
    if not decorated:
        return remote
    (function,) = decorated
    if isinstance(function, type):
        raise ModuleNotFoundError(f"{function.__module__}.{function.__name__} is an actor of ray", name="ray")
    return RemoteFunction(function)


def put(value: Any) -> Any:
    return value


def get(values: Any, **_) -> Any:
    """Returns results of `remote`, which are the values themselves."""
    return values
