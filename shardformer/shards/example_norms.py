"""The norm of every single example's gradient, and the gradient noise scale that follows from them.

Trees are Haiku's {module: {name: leaf}}. `measure_squares` is shard view; the others take its result in either view.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from shardformer.config.names import MP
from shardformer.kernels.microbatch import micro_grad
from shardformer.shards.parameters import is_stacked


class Noise(NamedTuple):
    """Unbiased estimates from one batch. Either may be averaged over steps, and only then divided."""

    variance: jax.Array  # trace of the covariance of an example's gradient
    signal: jax.Array  # squared norm of the true gradient; its estimate may be negative

    @property
    def scale(self):
        """The simple noise scale of McCandlish et al. (2018): batches far above it buy little."""
        return self.variance / self.signal


def measure_squares(objective: Callable, params, batch, specs, microbatch_size: int = 1):
    """Squared norms of the gradients of this shard's examples: a tree like `params` of [rows], or [rows, L] in layers.

    `objective(params, batch)` is the scalar that is minimised, on a batch of one row that carries its number. `specs`
    says which parameters are split over mp: the squares of their parts are added up, the others count once. Gradients
    exist for `microbatch_size` examples at a time; the sum over mp is one collective at the end.
    """
    gradients = micro_grad(
        objective, microbatch_size=microbatch_size, transform_fn=lambda gradient: None, metrics_fn=_local_squares
    )
    add_up = lambda square, spec: lax.psum(square, MP) if MP in jax.tree.leaves(tuple(spec)) else square
    return jax.tree.map(add_up, gradients(params, batch)[1].metrics, specs)


def sum_all(squares):
    """[rows]: over all parameters."""
    return sum(leaf if leaf.ndim == 1 else leaf.sum(1) for leaf in jax.tree.leaves(squares))


def sum_by_layer(squares):
    """[rows, L]: over the parameters of each layer."""
    return sum(leaf for module, leaves in squares.items() if is_stacked(module) for leaf in leaves.values())


def estimate_noise(square_B, mean_square) -> Noise:
    """From the squared norms of a whole batch's gradients and that of their mean: global view."""
    (examples,) = square_B.shape
    if examples < 2:
        raise ValueError(f"the gradient noise of a batch needs 2 examples or more to differ; got {examples}")
    variance = (square_B.mean() - mean_square) * (examples / (examples - 1))
    return Noise(variance, mean_square - variance / examples)


def _local_squares(gradient):
    return {
        module: {name: _square(leaf, kept=int(is_stacked(module))) for name, leaf in leaves.items()}
        for module, leaves in gradient.items()
    }


def _square(leaf, kept: int):
    return jnp.square(leaf.astype(jnp.float32)).sum(range(kept, leaf.ndim))
