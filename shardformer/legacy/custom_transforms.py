"""`jax.custom_transforms` and its rules, which jax had up to 0.2.9, by custom_jvp and custom_vjp."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


class CustomTransforms:
    """A function whose derivative is defined afterwards; without a rule it is that of its operations."""

    def __init__(self, fun: Callable):
        functools.update_wrapper(self, fun)
        self.fun = self.call = fun

    def __call__(self, *arguments: Any) -> Any:
        return self.call(*arguments)


custom_transforms = CustomTransforms


def defvjp_all(fun: CustomTransforms, rule: Callable) -> None:
    """Defines `rule(*arguments)` as the result, and the function from its cotangent to those of the arguments.

    The rule runs again where the cotangent is known, as jax keeps arrays only; XLA computes common parts once.
    """
    with_rule = jax.custom_vjp(fun.fun)
    with_rule.defvjp(lambda *x: (rule(*x)[0], x), lambda x, cotangent: tuple(rule(*x)[1](cotangent)))
    fun.call = with_rule


def defvjp(fun: CustomTransforms, *rules: Callable | None) -> None:
    """Defines `rule(cotangent, result, *arguments)` for each argument; None is a cotangent of zeros."""

    def rule(*x):
        result = fun.fun(*x)
        return result, lambda cotangent: (r if r is None else r(cotangent, result, *x) for r in rules)

    defvjp_all(fun, rule)


def defjvp_all(fun: CustomTransforms, rule: Callable) -> None:
    """Defines `rule(arguments, tangents)` as the result and its tangent."""
    with_rule = jax.custom_jvp(fun.fun)
    with_rule.defjvp(rule)
    fun.call = with_rule


def defjvp(fun: CustomTransforms, *rules: Callable | None) -> None:
    """Defines `rule(tangent, result, *arguments)` for each argument; their sum is the tangent."""

    def rule(x, tangents):
        result = fun.fun(*x)
        parts = [r(t, result, *x) for r, t in zip(rules, tangents, strict=True) if r is not None]
        return result, functools.reduce(jnp.add, parts, jnp.zeros_like(result))

    defjvp_all(fun, rule)
