"""Grouped products equal products of each token with its expert's matrix, and no token is dropped."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.experts import grouped_product
from shardformer.experts.grouped_product import Blocks, Copies, Kernel, combine, dispatch, group_tokens, join_rows
from tests import asserts

TOKENS, CHOICES, EXPERTS, D, F = 13, 2, 5, 6, 4
DRAW = np.random.default_rng(0)
X, W = (DRAW.normal(size=shape).astype(np.float32) for shape in ((TOKENS, D), (EXPERTS, D, F)))
GATE = DRAW.random((TOKENS, CHOICES)).astype(np.float32)
CHOICE = np.stack([DRAW.choice([0, 1, 3, 4], CHOICES, replace=False) for _ in range(TOKENS)])  # expert 2 has no tokens


def multiply(product, x, w, gate, groups):
    weighed = grouped_product.weigh(dispatch(x, groups), grouped_product.list_gates(gate, groups))
    return product.multiply(weighed, w, groups.size_E)


def mix(product, x, w, gate, first, experts):
    groups = group_tokens(jnp.asarray(CHOICE), first, experts, product.block, product.tile)
    return combine(multiply(product, x, w[first : first + experts], gate, groups), groups)


def mix_densely(x, w, gate, first, experts):
    is_local = np.isin(CHOICE, np.arange(first, first + experts)).astype(np.float32)
    chosen = np.eye(EXPERTS, dtype=np.float32)[CHOICE] * is_local[..., None]
    return jnp.einsum("ncE,nc,nd,Edf->nf", chosen, gate, x, w)


def run_exactly(function, *arguments):
    return exact.run(function, *arguments).outputs


def differentiate(function, first, experts):
    def total(x, w, gate):
        return (function(x, w, gate, first, experts) ** 2).sum()

    return jax.value_and_grad(total, (0, 1, 2))


PARTS = pytest.mark.parametrize(("first", "experts"), [(0, EXPERTS), (2, 2)])


@pytest.mark.parametrize("product", [Blocks(4), Blocks(1), Copies(4)], ids=str)
@PARTS
def test_values_and_gradients_of_a_grouped_product(product, first, experts):
    grouped = differentiate(functools.partial(mix, product), first, experts)
    got, want = (run_exactly(each, X, W, GATE) for each in (grouped, differentiate(mix_densely, first, experts)))
    assert asserts.worst_relative(got, want) < 1e-14
    assert (got[1][1][2] == 0).all()  # of the expert without tokens


@pytest.mark.slow
@pytest.mark.parametrize("product", [Kernel(8, interpret=True), Blocks(4), Copies(4)], ids=str)
@PARTS
def test_compiled_grouped_product_is_the_exact_one(product, first, experts):
    got = jax.jit(differentiate(functools.partial(mix, product), first, experts))(X, W, GATE)
    assert asserts.worst_relative(got, run_exactly(differentiate(mix_densely, first, experts), X, W, GATE)) < 1e-6
    assert (got[1][1][2] == 0).all()


def test_weighing_stores_no_rows_in_float32():
    x_MI, gate_M = jnp.ones((8, 16), jnp.bfloat16), jnp.ones(8)
    _, backward = jax.vjp(grouped_product.weigh, x_MI, gate_M)
    stored = {(leaf.shape, leaf.dtype.name) for leaf in jax.tree.leaves(backward)}
    assert stored == {((8, 16), "bfloat16"), ((8,), "float32")}


def test_dropped_token_is_noticed():
    def lose_one(x, w, gate):
        groups = group_tokens(jnp.asarray(CHOICE), 0, EXPERTS, 4)
        lost = groups._replace(row_NC=groups.row_NC.at[3, 0].set(groups.pair_M.shape[0]))
        y = multiply(Blocks(4), x, w, gate, groups)
        return combine(y, groups), combine(y, lost)

    got, lost = run_exactly(lose_one, X, W, GATE)
    want = run_exactly(lambda *args: mix_densely(*args, 0, EXPERTS), X, W, GATE)
    assert asserts.relative(got, want) < 1e-14
    assert np.abs(lost - want).max() > 1e-2


def test_every_pair_has_a_row_of_its_expert():
    groups = group_tokens(jnp.asarray(CHOICE), 0, EXPERTS, 4)
    rows, ends = np.asarray(groups.row_NC), np.cumsum(groups.size_E)
    assert len(np.unique(rows)) == TOKENS * CHOICES
    assert (np.searchsorted(ends, rows, side="right") == CHOICE).all()
    assert (np.asarray(groups.token_M)[rows] == np.arange(TOKENS)[:, None]).all()


def mix_rows(weights, x, choice, gate):
    groups = group_tokens(choice, 0, EXPERTS, 4)
    return combine(multiply(Blocks(4), x, weights["w"], gate, groups), groups)


@pytest.mark.parametrize("joined", [True, False])
def test_rows_of_a_vmap_share_one_product(joined):
    """A vmap without `join_rows` pads the groups of each row."""
    rows, draw = 3, np.random.default_rng(1)
    x = draw.normal(size=(rows, TOKENS, D)).astype(np.float32)
    choice = np.stack([np.roll(CHOICE, row, axis=0) for row in range(rows)])
    gate = draw.random((rows, TOKENS, CHOICES)).astype(np.float32)
    apply = jax.vmap(join_rows(mix_rows) if joined else mix_rows, (None, 0, 0, 0))
    weights = {"w": W}
    expected = [run_exactly(mix_rows, weights, *row) for row in zip(x, choice, gate, strict=True)]
    assert asserts.relative(run_exactly(apply, weights, x, choice, gate), expected) < 1e-14
    padded = len(group_tokens(choice[0], 0, EXPERTS, 4).pair_M)
    is_apart = f"f32[{rows},{padded},{D}]" in str(jax.make_jaxpr(apply)(weights, x, choice, gate))
    assert is_apart is not joined
