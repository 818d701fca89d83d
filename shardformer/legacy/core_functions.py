"""Internal names of `jax.core`, `jax.lax` and `jax.interpreters` that left, or have other signatures or results."""

import types
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import ShapedArray
from jax.extend.core import (
    Jaxpr,
    Primitive,
    Var,
    get_opaque_trace_state,
    unsafe_am_i_under_a_jit_DO_NOT_USE,
    unsafe_am_i_under_a_vmap_DO_NOT_USE,
)
from jax.interpreters import ad, batching, mlir
from jax.interpreters.partial_eval import PartialVal

not_mapped = None
reducing_transposes: dict[Primitive, Callable] = {}  # rules of xmap's gradients; no primitive has one any more


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


class DShapedArray:
    """The type of arrays with dynamic shapes, which jax never offered without a flag: nothing has it."""


def is_constant_dim(d: Any) -> bool:
    """Returns whether a dimension of a shape is known, not symbolic."""
    return not jax.export.is_symbolic_dim(d)


def lattice_join(x: ShapedArray | None, y: ShapedArray | None) -> ShapedArray:
    """Returns the abstract value that covers both; None covers nothing."""
    if x is None or y is None:
        return x if y is None else y  # type: ignore[return-value]  # both None: as it was
    if (x.shape, x.dtype) != (y.shape, y.dtype):
        raise TypeError(x, y)
    return ShapedArray(x.shape, x.dtype, weak_type=x.weak_type and y.weak_type)


def raise_to_shaped(aval: Any, weak_type: bool | None = None) -> Any:
    """Returns an abstract value without its concrete value: none has one today. weak_type: of the result, if given."""
    return aval if weak_type is None else aval.update(weak_type=weak_type)


raise_to_shaped_mappings: dict[type, Callable] = {}  # rules of types that a program defines; nothing asks for them


def _define_zeros_like() -> Primitive:
    """Returns a primitive as `zeros_like_p` was; no function of jax binds it any more."""
    primitive = Primitive("zeros_like")
    primitive.def_impl(jnp.zeros_like)
    primitive.def_abstract_eval(lambda aval: aval)
    mlir.register_lowering(primitive, mlir.lower_fun(jnp.zeros_like, multiple_results=False))
    ad.deflinear2(primitive, lambda cotangent, x: [ad.Zero(x.aval)])
    batching.defvectorized(primitive)
    return primitive


zeros_like_p = _define_zeros_like()


def _reduce_window_sum(operand, window_dimensions, window_strides, padding, base_dilation=None, window_dilation=None):
    """Returns the sum of each window of `operand`."""
    zero = np.zeros((), operand.dtype)
    return jax.lax.reduce_window(
        operand, zero, jax.lax.add, window_dimensions, window_strides, padding, base_dilation, window_dilation
    )


def _find_batch_tracer() -> type:
    """Returns the class of the values that a function sees under vmap, which jax does not export."""
    seen: list[type] = []
    jax.eval_shape(jax.vmap(lambda x: seen.append(type(x))), jax.ShapeDtypeStruct((1,), "float32"))
    return seen[0]


BatchTracer = _find_batch_tracer()


class _RunningTrace(NamedTuple):
    """An entry of the stack of traces. Two that differ ran under different transformations."""

    trace_type: type
    level: Any


class _TraceStack:
    """A stand-in for the stack of traces, which jax no longer has: its text names the types of traces that run."""

    @property
    def stack(self) -> list[_RunningTrace]:
        return [_RunningTrace(jax.core.Trace, get_opaque_trace_state(convention="haiku"))]

    @property
    def dynamic(self) -> _RunningTrace:
        return self.stack[-1]

    def __repr__(self) -> str:
        running = {
            "BatchTrace": unsafe_am_i_under_a_vmap_DO_NOT_USE(),
            "DynamicJaxprTrace": unsafe_am_i_under_a_jit_DO_NOT_USE(),
        }
        return f"[{', '.join(['EvalTrace', *(name for name, runs in running.items() if runs)])}]"


thread_local_state = types.SimpleNamespace(trace_state=types.SimpleNamespace(trace_stack=_TraceStack()))


def cur_sublevel() -> int:
    """Returns 0: the level of an entry of the stack tells calls apart as well."""
    return 0


def linearize(traceable: Any, *primals: Any, has_aux: bool = False) -> tuple:
    """Returns what `ad.linearize` of a wrapped function did: (primals_out, pvals, jaxpr, consts), then any aux.

    pvals: the partial value of each result's tangent. The tangent is unknown, and a result of the linear `jaxpr`, if
    it depends on the tangent of an argument; other tangents are known zeros.
    """
    options: dict[str, Any] = {"has_aux": True} if has_aux else {}
    primals_out, push, *aux = jax.linearize(traceable.call_wrapped, *primals, **options)
    tangents = [jax.typeof(primal).to_tangent_aval() for primal in primals]
    avals = [jax.typeof(primal).to_tangent_aval() for primal in primals_out]
    depends = _depend_on_arguments(jax.make_jaxpr(push)(*tangents).jaxpr)

    def push_dependent(*args: Any) -> list:
        return [tangent for tangent, varies in zip(push(*args), depends, strict=True) if varies]

    linear = jax.make_jaxpr(push_dependent)(*tangents)
    pvals = [
        PartialVal.unknown(aval) if varies else PartialVal.known(jnp.zeros(aval.shape, aval.dtype))
        for aval, varies in zip(avals, depends, strict=True)
    ]
    return primals_out, pvals, linear.jaxpr, linear.consts, *aux


def _depend_on_arguments(jaxpr: Jaxpr) -> list[bool]:
    """Returns for each result of a jaxpr whether it depends on an argument."""
    reached = set(jaxpr.invars)
    for equation in jaxpr.eqns:
        if any(isinstance(x, Var) and x in reached for x in equation.invars):
            reached.update(equation.outvars)
    return [isinstance(x, Var) and x in reached for x in jaxpr.outvars]
