"""`jax.interpreters.xla.register_translation`: translation rules, over the lowering rules that replaced them.

A rule that passes its operands on works. jaxlib has no XlaBuilder any more, so that a rule cannot make operations.
"""

from collections.abc import Callable, Sequence
from typing import Any

from jax.extend.core import Primitive
from jax.interpreters import mlir

XlaOp = mlir.ir.Value


class TranslationContext:
    """The first argument of a translation rule."""

    def __init__(self, lowering: mlir.LoweringRuleContext):
        self.platform = lowering.module_context.platforms[0]
        self.lowering = lowering

    @property
    def builder(self):
        raise NotImplementedError(
            "jaxlib has no XlaBuilder any more: write the rule in MLIR, for jax.interpreters.mlir.register_lowering"
        )


def register_translation(prim: Primitive, rule: Callable, *, platform: str | None = None) -> None:
    """Registers `rule(context, avals_in, avals_out, *operands, **params)`, which returns a sequence of results."""

    def lower(context: mlir.LoweringRuleContext, *operands: XlaOp, **params: Any) -> Sequence[XlaOp]:
        return list(rule(TranslationContext(context), context.avals_in, context.avals_out, *operands, **params))

    mlir.register_lowering(prim, lower, platform=platform)


def lower_fun(fun: Callable, *, multiple_results: bool, new_style: bool = True, **_) -> Callable:
    """Returns the translation rule of a function of arrays."""
    rule = mlir.lower_fun(fun, multiple_results=multiple_results)

    def translate(context: TranslationContext, avals_in, avals_out, *operands: XlaOp, **params: Any) -> Sequence[XlaOp]:
        return rule(context.lowering, *operands, **params)

    return translate
