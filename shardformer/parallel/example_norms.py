"""The norm of each example's gradient, and the gradient noise scale that follows from these norms.

Trees are Haiku's {module: {name: leaf}}. `measure_squares` is shard view; the rest accept its result in either view.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from shardformer import collectives
from shardformer.config.names import MP, is_stacked
from shardformer.parallel.microbatch import micro_grad


class Noise(NamedTuple):
    """Unbiased estimates from one batch. Average each over steps first, and only then divide."""

    variance: Array  # trace of the covariance of an example's gradient
    signal: Array  # squared norm of the true gradient; its estimate may be negative

    @property
    def scale(self) -> Array:
        """The simple noise scale of McCandlish et al. (2018): batches far above it buy little."""
        return self.variance / self.signal


def measure_squares(objective: Callable, params: dict, batch: dict, specs: dict, microbatch_size: int = 1) -> dict:
    """Returns the squared norms of the gradients of this shard's examples: a tree of [rows], or [rows, L] in layers.

    `objective(params, batch)` is the scalar that training minimises, on a batch of one row that carries its number.
    `specs` gives the parameters that are split over mp: the squares of their parts are added up, replicas count once.
    Gradients exist for `microbatch_size` examples at a time; the sum over mp is one collective at the end.
    """
    gradients = micro_grad(
        objective, microbatch_size=microbatch_size, transform_fn=lambda gradient: None, metrics_fn=_local_squares
    )

    def add_parts(square, spec):
        return collectives.psum(square, MP) if MP in jax.tree.leaves(tuple(spec)) else square

    return jax.tree.map(add_parts, gradients(params, batch)[1].metrics, specs)


def sum_all(squares: dict) -> Array:
    """Adds up over all parameters: [rows]."""
    return sum(leaf if leaf.ndim == 1 else leaf.sum(1) for leaf in jax.tree.leaves(squares))


def sum_by_layer(squares: dict) -> Array:
    """Adds up over the parameters of each layer: [rows, L]."""
    return sum(leaf for module, leaves in squares.items() if is_stacked(module) for leaf in leaves.values())


def estimate_noise(square_B: Array, mean_square: Array) -> Noise:
    """Estimates noise from the squared norms of a batch's gradients and that of their mean. Global view."""
    (examples,) = square_B.shape
    if examples < 2:
        raise ValueError(f"the gradient noise of a batch of {examples} example cannot be estimated; give at least 2")
    variance = (square_B.mean() - mean_square) * (examples / (examples - 1))
    return Noise(variance, mean_square - variance / examples)


def _local_squares(gradient):
    return {
        module: {name: _square(leaf, kept=int(is_stacked(module))) for name, leaf in leaves.items()}
        for module, leaves in gradient.items()
    }


def _square(leaf, kept: int):
    """Squares and adds up all but the first `kept` axes."""
    return jnp.square(leaf.astype(jnp.float32)).sum(range(kept, leaf.ndim))
