"""The speedrun's SOAP in float64, against its algorithm on one flattened matrix in NumPy."""

import jax
import numpy as np
import pytest

from shardformer.bench import soap, speedrun
from shardformer.config.registries import call_with
from shardformer.optim import chain
from tests import asserts, shared

BETA1, BETA2, STEPS = 0.8, 0.9, 8


@pytest.fixture(scope="module")
def gradients():
    """The gradients of two layers' matrices.

    Of the rows' first four eigenvectors only one has no gradient: it is unique.
    """
    return np.random.default_rng(0).standard_normal((STEPS, 2, 4, 3)) * np.array([[1.0], [2.0], [0.5], [0.1]])


@pytest.fixture(scope="module")
def updates(gradients):
    """By the optimizer, with new eigenvectors at every second update."""
    with pytest.MonkeyPatch.context() as patch, jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        patch.setattr(soap, "FREQUENCY", 2)
        optimizer = soap.scale_by_soap(BETA1, BETA2)
        state, update, found = optimizer.init(gradients[0]), jax.jit(optimizer.update), []
        for gradient in gradients:
            updates, state = update(gradient, state)
            found.append(np.asarray(updates))
    return np.stack(found)


def find_updates(gradients, frequency=2):
    """Adam of all numbers of one matrix, in one basis for all of them; Cholesky's factors orthogonalise it."""
    momentum, squares, updates = np.zeros(12), np.zeros(12), [np.zeros((4, 3))]
    covariances, bases = [np.zeros((4, 4)), np.zeros((3, 3))], [None, None]
    for step, gradient in enumerate(gradients):
        if step:
            basis = np.kron(*bases)
            momentum = BETA1 * momentum + (1 - BETA1) * gradient.ravel()
            squares = BETA2 * squares + (1 - BETA2) * (basis.T @ gradient.ravel()) ** 2
            scaled = basis.T @ momentum / (1 - BETA1**step) / (np.sqrt(squares) + 1e-8) * np.sqrt(1 - BETA2**step)
            updates.append((basis @ scaled).reshape(4, 3))
        products = gradient @ gradient.T, gradient.T @ gradient
        covariances = [BETA2 * old + (1 - BETA2) * new for old, new in zip(covariances, products, strict=True)]
        if not step:
            bases = [np.linalg.svd(covariance)[0] for covariance in covariances]
        elif step % frequency == 0:
            orders = [np.argsort(-np.diag(q.T @ c @ q)) for c, q in zip(covariances, bases, strict=True)]
            squares = squares.reshape(4, 3)[np.ix_(*orders)].ravel()
            powers = [c @ q[:, order] for c, q, order in zip(covariances, bases, orders, strict=True)]
            bases = [power @ np.linalg.inv(np.linalg.cholesky(power.T @ power).T) for power in powers]
    return np.stack(updates)


def test_updates_are_adam_s_along_the_eigenvectors(updates, gradients):
    for layer in range(2):
        assert asserts.relative(updates[:, layer], find_updates(gradients[:, layer])) < 1e-9


def test_first_eigenvectors_only_would_give_other_updates(updates, gradients):
    """The negative twin."""
    assert asserts.relative(updates[:, 0], find_updates(gradients[:, 0], frequency=STEPS)) > 1e-2


def test_vectors_and_long_tables_are_updated_by_adam(monkeypatch):
    monkeypatch.setattr(soap, "LONGEST", 8)
    layers = {"q": np.ones((2, 4, 3), np.float32), "q_bias": np.ones((2, 3), np.float32)}
    params = {"transformer/layers": layers, "transformer/embed": {"tokens": np.ones((9, 4), np.float32)}}
    state = call_with(soap.soap, chain.list_inputs(shared.tiny())).init(params)
    leaves = jax.tree.leaves(state, is_leaf=lambda node: isinstance(node, soap.Matrix))
    assert [leaf.momentum.shape for leaf in leaves if isinstance(leaf, soap.Matrix)] == [(2, 4, 3)]


def test_recipe_s_file_lies_next_to_the_recipes():
    assert speedrun.make_settings("soap", {}).optimizer.name == f"{soap.__file__}:soap"
