"""Muon and NorMuon for each layer's matrices, one for each expert; adam for all other parameters."""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from jax import tree_util
from optax import contrib
from optax.transforms import chain  # see chain.py

from shardformer.config.names import ALL_MATRICES, PREFIX
from shardformer.config.optimizer_keys import OptimizerKeys

# Layers and experts are stacked on leading axes: the last two are the matrix.
MATRIX = contrib.MuonDimensionNumbers(reduction_axis=-2, output_axis=-1)
OF_LAYERS = {*ALL_MATRICES}
RMS_OF_ADAM = 0.2  # of a typical adam update (arXiv:2502.16982), so that lr and weight_decay mean the same for both
BETA2 = 0.95  # NorMuon's decay of the mean squares of outputs (arXiv:2510.05491)


def scale_by_muon(
    keys: OptimizerKeys, adam: optax.GradientTransformation, map_matrices: Callable
) -> optax.GradientTransformation:
    """Sets the momentum's singular values to about one, and scales the updates to the size of adam's.

    Iterates on full matrices: XLA would split every iteration, and send 6.7 times the bytes of a gather.
    """
    muon = chain(
        _muon(ns_steps=0, preconditioning="aol", beta=keys.momentum),  # only the momentum
        optax.stateless(lambda updates, _: map_matrices(_orthogonalise, updates)),
        *([balance_outputs()] if keys.name == "normuon" else []),
    )
    return optax.partition({"muon": muon, "adam": adam}, lambda tree: tree_util.tree_map_with_path(_label, tree))


def balance_outputs() -> optax.GradientTransformation:
    """Divides the update of each output by the root of its mean square over the steps (NorMuon).

    Muon's updates of some outputs are several times as large as those of others. The size of the matrix's update stays.
    """

    def start(params):
        return jax.tree.map(lambda matrix: jnp.zeros_like(_mean_square(matrix)), params)

    def update(updates, squares, params=None):
        squares = jax.tree.map(lambda old, u: BETA2 * old + (1 - BETA2) * _mean_square(u), squares, updates)
        return jax.tree.map(_divide, updates, squares), squares

    return optax.GradientTransformation(start, update)


def _mean_square(matrices):
    """Returns the mean square of each output [..., 1, outputs]."""
    return jnp.mean(matrices * matrices, axis=-2, keepdims=True)


def _divide(matrices, squares):
    """Returns the matrices over the roots of the squares, as large as adam's updates."""
    balanced = matrices * jax.lax.rsqrt(squares + 1e-10)  # an output without gradients has no update
    return balanced * (RMS_OF_ADAM * jax.lax.rsqrt(jnp.mean(balanced**2, axis=(-2, -1), keepdims=True) + 1e-10))


def _label(path, leaf) -> str:
    """Chooses by name for the language model's parameters, whose vectors are stacked, else by dimensions."""
    module, name = path[0].key, path[-1].key
    return "muon" if (name in OF_LAYERS if module.startswith(PREFIX) else leaf.ndim == 2) else "adam"


def _orthogonalise(matrices):
    """Returns updates as large as adam's."""
    iteration = _muon(beta=0.0, nesterov=False)
    updates, _ = iteration.update(matrices, iteration.init(matrices))
    return updates * (RMS_OF_ADAM * math.sqrt(max(matrices.shape[-2:])))


def _muon(**options) -> optax.GradientTransformation:
    return contrib.scale_by_muon(weight_dimension_numbers=lambda tree: jax.tree.map(lambda _: MATRIX, tree), **options)
