"""Defects for negative twins: a function of the product is broken on purpose, to see that a test notices."""

from collections.abc import Callable

import pytest


class Defects:
    """Replaces functions of the product by wrong ones; `check` fails if one of them was never called.

    A twin whose defect is never executed would pass for another reason, and show nothing.
    """

    def __init__(self, patch: pytest.MonkeyPatch):
        self._patch = patch
        self._unused: set[str] = set()

    def __call__(self, owner, name: str, wrong: Callable) -> None:
        """Breaks the function or method `name` of a module, class or object until the test ends."""
        label = f"{getattr(owner, '__name__', type(owner).__name__)}.{name}"
        self._unused.add(label)

        def defect(*arguments, **named):
            self._unused.discard(label)
            return wrong(*arguments, **named)

        self._patch.setattr(owner, name, defect)

    def check(self) -> None:
        assert not self._unused, f"broken and never called: {', '.join(sorted(self._unused))}"
