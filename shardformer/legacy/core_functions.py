"""Names of `jax.core` and `jax.interpreters.batching` whose signatures or results have changed since."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.extend.core import (
    Jaxpr,
    Var,
    unsafe_am_i_under_a_jit_DO_NOT_USE,
    unsafe_am_i_under_a_vmap_DO_NOT_USE,
)

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


def _find_batch_tracer() -> type:
    """Returns the class of the values that a function sees under vmap, which jax does not export."""
    seen: list[type] = []
    jax.eval_shape(jax.vmap(lambda x: seen.append(type(x))), jax.ShapeDtypeStruct((1,), "float32"))
    return seen[0]


BatchTracer = _find_batch_tracer()


class _TraceStack:
    """A stand-in for the stack of traces, which jax no longer has: its text names the types of traces that run."""

    def __repr__(self) -> str:
        running = {
            "BatchTrace": unsafe_am_i_under_a_vmap_DO_NOT_USE(),
            "DynamicJaxprTrace": unsafe_am_i_under_a_jit_DO_NOT_USE(),
        }
        return f"[{', '.join(['EvalTrace', *(name for name, runs in running.items() if runs)])}]"


thread_local_state = types.SimpleNamespace(trace_state=types.SimpleNamespace(trace_stack=_TraceStack()))
