"""Names that can be imported again but not used: each use raises an error that names today's way."""

import enum
import types
from collections.abc import Callable, Hashable


class RemovedObject:
    """A stand-in for an object that nothing here can replace."""

    def __init__(self, name: str, advice: str):
        self._name, self._advice = name, advice

    def __getattr__(self, attribute: str):
        if attribute.startswith("__"):  # what copy, inspect and the like ask of any object
            raise AttributeError(attribute)
        self._refuse()

    def __call__(self, *_, **__):
        self._refuse()

    def __repr__(self) -> str:
        return f"<{self._name}, removed: {self._advice}>"

    def _refuse(self):
        raise NotImplementedError(f"{self._name} left with jax's own xmap: {self._advice}")


xmap_p = RemovedObject("jax.experimental.maps.xmap_p", "an xmapped function is a jit of vmaps now; call xmap itself")
make_xmap_callable: Callable = RemovedObject(
    "jax.experimental.maps.make_xmap_callable", "write xmap(...).lower(*arguments).compile()"
)
ResourceSet = Hashable | tuple[Hashable, ...]


class _PositionalSemantics(enum.Enum):
    """The two meanings of an array, a part or the whole: today it is always the whole."""

    LOCAL = 0
    GLOBAL = 1


_positional_semantics = types.SimpleNamespace(val=_PositionalSemantics.LOCAL)
