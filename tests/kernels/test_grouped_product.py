"""Grouped products equal products of each token with its expert's matrix, and no token is dropped."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.kernels.grouped_kernel import Kernel
from shardformer.kernels.grouped_product import Blocks, combine, dispatch, group_tokens, join_rows

TOKENS, CHOICES, EXPERTS, D, F = 13, 2, 5, 6, 4
DRAW = np.random.default_rng(0)
X, W = (DRAW.normal(size=shape).astype(np.float32) for shape in ((TOKENS, D), (EXPERTS, D, F)))
GATE = DRAW.random((TOKENS, CHOICES)).astype(np.float32)
CHOICE = np.stack([DRAW.choice([0, 1, 3, 4], CHOICES, replace=False) for _ in range(TOKENS)])  # expert 2 has no tokens
PRODUCTS = [Kernel(8, interpret=True), Blocks(4), Blocks(1)]


def mix(product, x, w, gate, first, experts):
    groups = group_tokens(jnp.asarray(CHOICE), first, experts, product.block, product.tile)
    y = product.multiply(dispatch(x, groups), w[first : first + experts], groups.size_E)
    return combine(y, gate, groups)


def mix_densely(x, w, gate, first, experts):
    is_local = np.isin(CHOICE, np.arange(first, first + experts)).astype(np.float32)
    chosen = np.eye(EXPERTS, dtype=np.float32)[CHOICE] * is_local[..., None]
    return jnp.einsum("ncE,nc,nd,Edf->nf", chosen, gate, x, w)


@pytest.mark.slow
@pytest.mark.parametrize("product", PRODUCTS, ids=str)
@pytest.mark.parametrize(("first", "experts"), [(0, EXPERTS), (2, 2)])
def test_values_and_gradients_of_a_grouped_product(product, first, experts):
    def total(function):
        return lambda x, w, gate: (function(x, w, gate, first, experts) ** 2).sum()

    def grouped(*args):
        return mix(product, *args)

    got, want = (jax.jit(jax.value_and_grad(total(f), (0, 1, 2)))(X, W, GATE) for f in (grouped, mix_densely))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=2e-5, rtol=2e-5), got, want)
    assert (got[1][1][2] == 0).all()  # of the expert without tokens, exactly


def test_dropped_token_is_noticed():
    groups = group_tokens(jnp.asarray(CHOICE), 0, EXPERTS, 4)
    lost = groups._replace(row_NC=groups.row_NC.at[3, 0].set(groups.token_M.shape[0]))
    y = Blocks(4).multiply(dispatch(jnp.asarray(X), groups), jnp.asarray(W), groups.size_E)
    want = mix_densely(X, W, GATE, 0, EXPERTS)
    np.testing.assert_allclose(combine(y, GATE, groups), want, atol=1e-5)
    assert np.abs(combine(y, GATE, lost) - want).max() > 1e-2


def test_every_pair_has_a_row_of_its_expert():
    groups = group_tokens(jnp.asarray(CHOICE), 0, EXPERTS, 4)
    rows, ends = np.asarray(groups.row_NC), np.cumsum(groups.size_E)
    assert len(np.unique(rows)) == TOKENS * CHOICES
    assert (np.searchsorted(ends, rows, side="right") == CHOICE).all()
    assert (np.asarray(groups.token_M)[rows] == np.arange(TOKENS)[:, None]).all()


def mix_rows(weights, x, choice, gate):
    groups = group_tokens(choice, 0, EXPERTS, 4)
    return combine(Blocks(4).multiply(dispatch(x, groups), weights["w"], groups.size_E), gate, groups)


@pytest.mark.parametrize("joined", [True, False])
def test_rows_of_a_vmap_share_one_product(joined):
    """A vmap without `join_rows` pads the groups of each row."""
    rows, draw = 3, np.random.default_rng(1)
    x = jnp.asarray(draw.normal(size=(rows, TOKENS, D)), jnp.float32)
    choice = jnp.stack([jnp.roll(jnp.asarray(CHOICE), row, axis=0) for row in range(rows)])
    gate = jnp.asarray(draw.random((rows, TOKENS, CHOICES)), jnp.float32)
    apply = jax.vmap(join_rows(mix_rows) if joined else mix_rows, (None, 0, 0, 0))
    weights = {"w": jnp.asarray(W)}
    expected = [mix_rows(weights, *row) for row in zip(x, choice, gate, strict=True)]
    np.testing.assert_allclose(apply(weights, x, choice, gate), jnp.stack(expected), atol=1e-5)
    padded = len(group_tokens(choice[0], 0, EXPERTS, 4).token_M)
    is_apart = f"f32[{rows},{padded},{D}]" in str(jax.make_jaxpr(apply)(weights, x, choice, gate))
    assert is_apart is not joined
