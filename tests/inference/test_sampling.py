"""The sampling rules keep the right tokens and draw them at the right frequencies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.config.sampling_keys import MOST_SAMPLES, Sampling
from shardformer.errors import UsageError
from shardformer.inference.sampling import Drawing, choose_tokens, find_largest
from tests import sharded

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.05, 0.3, 0.1], np.float32))
DRAWS = 4000
choose = jax.jit(choose_tokens)


def frequencies(logits=LOGITS, **options):
    many = np.broadcast_to(logits, (DRAWS, len(logits)))
    drawing = Drawing.from_sampling(Sampling(**{"temperature": 1.0} | options))
    ids = choose(many, jax.random.split(jax.random.key(0), len(many)), drawing)
    assert ids.dtype == np.int32
    return np.bincount(ids, minlength=len(logits)) / DRAWS


def drawn(logits=LOGITS, **options):
    return set(np.flatnonzero(frequencies(logits, **options)).tolist())


def test_find_largest_is_argmax_and_draws_are_jax_categorical():
    logits = np.round(sharded.normal(0, 64, 50), 1)  # with ties
    logits[0, 0] = logits[1, 49] = np.inf
    logits[2, 7:] = -np.inf
    logits[3, 5] = np.nan
    np.testing.assert_array_equal(jax.jit(find_largest)(logits), jnp.argmax(logits, -1).at[3].set(0))
    drawing, keys = Drawing.from_sampling(Sampling(temperature=1.0)), jax.random.split(jax.random.key(0), 60)
    expected = jax.vmap(jax.random.categorical)(keys, jnp.asarray(logits[4:]))
    np.testing.assert_array_equal(choose(logits[4:], keys, drawing), expected)
    assert (np.asarray(expected) != logits[4:].argmax(-1)).any()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    expected = np.exp(LOGITS / temperature)
    expected /= expected.sum()
    assert np.abs(frequencies(temperature=temperature) - expected).max() < 0.03
    assert np.abs(frequencies(temperature=2 * temperature) - expected).max() > 0.05


def test_greedy_takes_the_most_likely_token():
    assert drawn(temperature=0) == {1}
    assert drawn(top_k=1, temperature=2.0) == {1}
    assert drawn(top_p=1e-6, temperature=2.0) == {1}
    assert drawn(np.zeros(4, np.float32), temperature=0) == {0}  # the lowest id of a tie, as accuracy counts


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(2, {1, 4}), (3, {1, 4, 2, 5}), (4, {1, 4, 2, 5}), (6, set(range(6))), (0, set(range(6))), (99, set(range(6)))],
)
def test_top_k_keeps_the_k_most_likely_and_ties_of_the_last(top_k, kept):
    assert drawn(top_k=top_k) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.39, {1}), (0.41, {1, 4}), (0.69, {1, 4}), (0.71, {1, 4, 2, 5}), (0.91, set(range(6))), (1.0, set(range(6)))],
)
def test_top_p_keeps_the_fewest_that_reach_it_and_ties(top_p, kept):
    assert drawn(top_p=top_p) == kept


def test_top_p_applies_to_the_tokens_that_top_k_left():
    assert drawn(top_k=2, top_p=0.5) == {1}  # 0.4 of 0.7
    assert drawn(top_k=2, top_p=0.6) == {1, 4}
    left = frequencies(top_k=2)
    assert abs(left[1] - 4 / 7) < 0.03


def test_a_token_at_minus_infinity_is_never_drawn():
    logits = np.where(np.arange(6) == 1, -np.inf, LOGITS).astype(np.float32)
    for options in ({"temperature": 1e6}, {"top_k": 6}, {"top_p": 0.999}, {"temperature": 0}):
        assert 1 not in drawn(logits, **options)


@pytest.mark.parametrize("options", [{"temperature": 1e-39}, {"temperature": 1e-300}, {"top_p": 1e-300}])
def test_tiny_temperature_and_top_p_are_greedy(options):
    assert drawn(**options) == {1}
    assert drawn(LOGITS - 1e4, **options) == {1}


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_huge_temperature_draws_only_possible_tokens(temperature):
    logits = np.where(np.arange(6) > 2, -np.inf, 50 * LOGITS).astype(np.float32)
    expected = np.array([1, 1, 1, 0, 0, 0]) / 3
    assert np.abs(frequencies(logits, temperature=temperature) - expected).max() < 0.03
    assert np.abs(frequencies(logits, temperature=1.0) - expected).max() > 0.1


def test_rows_draw_independently():
    keys = jax.random.split(jax.random.key(0), 60)
    drawn = choose(np.zeros((60, 50), np.float32), keys, Drawing.from_sampling(Sampling()))
    assert len(set(drawn.tolist())) > 20


@pytest.mark.parametrize(("min_p", "kept"), [(0.74, {1, 4}), (0.76, {1}), (0.24, {1, 4, 2, 5}), (1.0, {1})])
def test_min_p_keeps_a_share_of_the_most_likely(min_p, kept):
    assert drawn(min_p=min_p) == kept


RULES = {
    "all": {},
    "temperature": {"temperature": 1.7},
    "top_k": {"top_k": 3},
    "top_p": {"top_p": 0.75},
    "min_p": {"min_p": 0.2},
    "all rules": {"temperature": 0.9, "top_k": 4, "top_p": 0.95, "min_p": 0.1},
}


def allowed(options) -> np.ndarray:
    """Returns each id's probability, computed by sorting."""
    p = np.exp(LOGITS.astype(np.float64) / options.get("temperature", 1.0))
    p /= p.sum()
    if k := options.get("top_k"):
        p = np.where(p >= np.sort(p)[-k] * (1 - 1e-6), p, 0)
        p /= p.sum()
    if "top_p" in options:
        order = np.sort(p)[::-1]
        edge = order[np.searchsorted(np.cumsum(order), options["top_p"])]
        p = np.where(p >= edge * (1 - 1e-6), p, 0)
        p /= p.sum()
    p = np.where(p >= options.get("min_p", 0) * p.max(), p, 0)
    return p / p.sum()


def chi_square(counts, p) -> float:
    assert not counts[p == 0].any()
    p, counts = p[p > 0], counts[p > 0]
    return float(((counts - p * counts.sum()) ** 2 / (p * counts.sum())).sum())


@pytest.mark.parametrize("rule", RULES)
def test_frequencies_of_20_000_draws(rule):
    draws = 20_000
    many = np.broadcast_to(LOGITS, (draws, len(LOGITS)))
    keys = jax.random.split(jax.random.key(1), draws)
    ids = choose(many, keys, Drawing.from_sampling(Sampling(**{"temperature": 1.0} | RULES[rule])))
    counts = np.bincount(ids, minlength=len(LOGITS))
    assert chi_square(counts, allowed(RULES[rule])) < 20.5  # 5 degrees of freedom: one run in 1,000 has more
    slightly_warmer = allowed(RULES[rule] | {"temperature": 1.3 * RULES[rule].get("temperature", 1.0)})
    assert (slightly_warmer > 0).tolist() != (counts > 0).tolist() or chi_square(counts, slightly_warmer) > 20.5


def test_repetition_penalty_applies_to_seen_tokens():
    many = np.broadcast_to(np.array([2.0, 1.5, -1.0, -1.2], np.float32), (DRAWS, 4))
    seen, keys = np.broadcast_to([True, False, True, False], many.shape), jax.random.split(jax.random.key(0), DRAWS)

    def draw(temperature, penalty):
        drawing = Drawing.from_sampling(Sampling(temperature=temperature, repetition_penalty=penalty))
        return choose(many, keys, drawing, seen)

    assert [set(draw(0, penalty).tolist()) for penalty in (1.0, 1.3, 1.4)] == [{0}, {0}, {1}]  # 2 / 1.4 < 1.5
    ids = draw(1.0, 2.0)
    expected = np.exp([1.0, 1.5, -2.0, -1.2]) / np.exp([1.0, 1.5, -2.0, -1.2]).sum()
    assert np.abs(np.bincount(ids, minlength=4) / DRAWS - expected).max() < 0.03


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"samples": 0}, {"stride": 0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
     {"temperature": -1.0}, {"temperature": float("inf")}, {"temperature": float("nan")}, {"seed": -1},
     {"min_p": 1.5}, {"repetition_penalty": 0.0}, {"samples": MOST_SAMPLES + 1}, {"tokens": 10**10}],
)  # fmt: skip
def test_invalid_sampling_values_are_rejected(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)
