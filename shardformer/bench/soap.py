"""SOAP (arXiv:2409.11321), an optimizer of a file: Adam along the eigenvectors of each matrix's gradients.

    python -m shardformer train tiny optimizer=shardformer/bench/soap.py:soap

The recipe `soap` of the speedrun trains by it. As in github.com/nikhilvyas/SOAP, the first gradient gives the first
eigenvectors and updates no matrix. If its rank is lower than a side of the matrix, rounding chooses the other vectors:
runs on two meshes differ from the second update on.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax

FREQUENCY = 10  # updates between two refreshes of the eigenvectors
LONGEST = 4096  # side of a matrix; one with a longer side, such as a table of 50,000 tokens, is updated by Adam
EPSILON = 1e-8


class Side(NamedTuple):
    """The rows or the columns of a matrix."""

    covariance: jax.Array  # the mean product of gradients [..., side, side]
    basis: jax.Array  # its eigenvectors, as columns; zeros before the first gradient


class Matrix(NamedTuple):
    """The state of a matrix [..., rows, columns], whose leading axes are layers."""

    momentum: jax.Array  # in the basis of both sides, as the squares
    squares: jax.Array
    rows: Side
    columns: Side


def soap(keys, decay_mask, scale_by_rate):
    """Returns the transformation: SOAP for matrices, Adam for all other parameters; see optim/README.md."""

    def name_kind(is_matrix, parameter) -> str:
        return "soap" if is_matrix and max(parameter.shape[-2:]) <= LONGEST else "adam"

    kinds = {"soap": scale_by_soap(keys.beta1, keys.beta2), "adam": optax.scale_by_adam(keys.beta1, keys.beta2)}
    return optax.chain(
        optax.partition(kinds, lambda params: jax.tree.map(name_kind, decay_mask(params), params)),
        optax.add_decayed_weights(keys.weight_decay, mask=decay_mask),
        scale_by_rate,
    )


def scale_by_soap(beta1: float, beta2: float) -> optax.GradientTransformation:
    """Divides the momentum by the root of the mean squares, both along the eigenvectors of the covariances."""

    def start(parameters):
        return jnp.zeros((), "int32"), jax.tree.map(_start_matrix, parameters)

    def follow(gradient, matrix: Matrix) -> Matrix:
        turned = _turn(gradient, matrix)  # zeros for the first gradient, which so is in no moment
        rows, columns = gradient @ gradient.mT, gradient.mT @ gradient
        return Matrix(
            beta1 * matrix.momentum + (1 - beta1) * turned,
            beta2 * matrix.squares + (1 - beta2) * turned**2,
            Side(beta2 * matrix.rows.covariance + (1 - beta2) * rows, matrix.rows.basis),
            Side(beta2 * matrix.columns.covariance + (1 - beta2) * columns, matrix.columns.basis),
        )

    def update(gradients, state, parameters=None):
        count, matrices = state
        matrices = jax.tree.map(follow, gradients, matrices)
        followed = jnp.maximum(count, 1)
        correction = jnp.sqrt(1 - beta2**followed) / (1 - beta1**followed)
        updates = jax.tree.map(lambda gradient, matrix: correction * _find_update(matrix), gradients, matrices)
        # After the update: in a basis that was fitted to its own gradient, this gradient would seem too small.
        due = jnp.where(count == 0, 2, jnp.where(count % FREQUENCY == 0, 1, 0))
        changes = (lambda same: same, _map_matrices(_refresh), _map_matrices(_decompose))
        return updates, (count + 1, jax.lax.switch(due, changes, matrices))

    return optax.GradientTransformation(start, update)


def _start_matrix(parameter) -> Matrix:
    zeros = jnp.zeros_like(parameter)
    rows, columns = (jnp.zeros_like(zeros, shape=(*zeros.shape[:-2], side, side)) for side in zeros.shape[-2:])
    return Matrix(zeros, zeros, Side(rows, rows), Side(columns, columns))


def _map_matrices(function):
    return lambda tree: jax.tree.map(function, tree, is_leaf=lambda node: isinstance(node, Matrix))


def _turn(array, matrix: Matrix):
    return matrix.rows.basis.mT @ array @ matrix.columns.basis


def _turn_back(array, matrix: Matrix):
    return matrix.rows.basis @ array @ matrix.columns.basis.mT


def _find_update(matrix: Matrix):
    return _turn_back(matrix.momentum / (jnp.sqrt(matrix.squares) + EPSILON), matrix)


def _decompose(matrix: Matrix) -> Matrix:
    """Finds the eigenvectors, those of the largest eigenvalues first."""
    rows, columns = (
        side._replace(basis=jnp.linalg.eigh(side.covariance)[1][..., ::-1]) for side in (matrix.rows, matrix.columns)
    )
    return matrix._replace(rows=rows, columns=columns)


def _refresh(matrix: Matrix) -> Matrix:
    """Improves the eigenvectors by one power iteration, in the order of their eigenvalues."""
    rows, row_order = _iterate(matrix.rows)
    columns, column_order = _iterate(matrix.columns)
    squares = jnp.take_along_axis(matrix.squares, row_order[..., :, None], axis=-2)
    squares = jnp.take_along_axis(squares, column_order[..., None, :], axis=-1)
    new = Matrix(matrix.momentum, squares, rows, columns)
    return new._replace(momentum=_turn(_turn_back(matrix.momentum, matrix), new))


def _iterate(side: Side):
    """Returns the side with its new basis, and the order of the old eigenvectors."""
    eigenvalues = jnp.sum(side.basis * (side.covariance @ side.basis), axis=-2)
    order = jnp.argsort(-eigenvalues, axis=-1)
    ordered = jnp.take_along_axis(side.basis, order[..., None, :], axis=-1)
    return side._replace(basis=jnp.linalg.qr(side.covariance @ ordered)[0]), order
