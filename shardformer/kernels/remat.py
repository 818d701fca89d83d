"""Recomputation: the activations that a backward pass keeps, by their names; it recomputes all others."""

from collections.abc import Callable
from typing import NamedTuple

import jax

PRODUCT, SUM = "product", "sum over mp"  # names: of a product with a matrix, and of an all-reduce's result


class Remat(NamedTuple):
    """The names of the activations to keep; None: all, because nothing is recomputed."""

    layer: tuple[str, ...] | None = None
    attention: tuple[str, ...] | None = None

    def recompute_layer(self, layer: Callable, in_loop: bool) -> Callable:
        """Returns the layer with a backward pass that recomputes all other activations.

        A layer in a loop needs no barriers against XLA's reuse of its forward pass, whose loop is another one. On a TPU
        they would copy each saved activation before it is read.
        """
        if self.layer is None:
            return layer
        if not self.layer:
            return jax.checkpoint(layer, prevent_cse=not in_loop)
        return jax.checkpoint(layer, policy=_keep(self.layer), prevent_cse=not in_loop)

    def recompute_attention(self, attend: Callable) -> Callable:
        """Returns attention with a backward pass that recomputes everything between its arguments and its result."""
        return attend if self.attention is None else jax.checkpoint(attend, policy=_keep(self.attention))


def _keep(names: tuple[str, ...]):
    return jax.checkpoint_policies.save_only_these_names(*names)
