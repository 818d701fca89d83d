"""The calls that a function of a source file makes, itself or through the functions that it mentions."""

import ast
from collections.abc import Iterator

from shardformer.legacy.call_arguments import Resolver

GRADIENT_NAMES = ("grad", "value_and_grad", "vjp", "linearize", "linear_transpose", "jacrev", "jacobian", "hessian")
GRADIENTS = {f"jax.{name}" for name in GRADIENT_NAMES}
# Derivatives that need no transpose, and those of haiku: with GRADIENTS, all that differentiate their first argument.
DERIVATIVES = GRADIENTS | {"jax.jvp", "jax.jacfwd", "haiku.grad", "haiku.value_and_grad"}


def calls_within(function: ast.AST | None, file: Resolver) -> Iterator[tuple[ast.Call, str]]:
    """Yields each call that a function reaches, with the dotted name of the called function or "".

    A mentioned name of the same file counts as a call; other files are not read.
    """
    pending, seen = [function], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        for inner in ast.walk(node):
            if isinstance(inner, ast.Call):
                yield inner, file.resolve(inner.func) or ""
            elif isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load):
                pending.append(file.assigned(inner.id))
