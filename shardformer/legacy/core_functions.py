"""Names of `jax.core` and `jax.interpreters.batching` whose signatures or results have changed since."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import Jaxpr, Var

not_mapped = None


class AxisFrame(NamedTuple):
    """A named axis that is bound where a function is traced; without the trace that bound it."""

    name: Any
    size: int


def axis_frame(axis_name: Any, main_trace: None = None) -> AxisFrame:
    """Returns the frame of a bound axis; raises NameError if no axis of this name is bound."""
    return AxisFrame(axis_name, jax.lax.axis_size(axis_name))


def gensym(jaxprs: list[Jaxpr] | None = None, suffix: str = "") -> Callable[[Any], Var]:
    """Returns a function from an abstract value to a new variable, which equals no other one."""

    def new_variable(aval: Any) -> Var:
        return Var(aval)

    return new_variable
