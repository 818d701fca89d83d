"""Decoding with a cache against plain full passes, and the right sets of tokens to draw from."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.errors import UsageError
from shardformer.inference import generator as generator_module
from shardformer.inference.generator import Drawing, Generator, Sampling
from shardformer.model import Model
from shardformer.parallel import mesh
from tests import reference, sharded, shared

SEQ = 8
GREEDY = Sampling(temperature=0)

# (config, prompt length, stride): within each, the text outgrows the context.
ROWS = {
    "rotary, parallel, scanned": ({}, 3, 1),
    "learned, sequential, unrolled": ({"positions": "learned", "block": "sequential", "scan": False}, 1, 3),
    "t5, sequential, scanned": ({"positions": "t5", "block": "sequential"}, 8, 1),
    "none, parallel, unrolled": ({"positions": "none", "scan": False, "tied": True}, 11, 20),
    "learned by width": ({"positions": "learned", "embed_split": "width"}, 20, 2),
}


@functools.cache
def model(name="1x1", **overrides):
    config = shared.tiny(**{"mesh": name, "seq": SEQ, "heads": 4, "batch": 8, "t5_buckets": 4} | overrides)
    return Model(config, mesh.make(config))


@functools.cache
def generator(name="1x1", **overrides):
    return Generator(model(name, **overrides))


@functools.cache
def parameters(name="1x1", **overrides):
    """Matrices larger than any initialisation, so that what follows depends on all of the context."""
    m = model(name, **overrides)
    scale = lambda path: 0.1 if path[-1].key.endswith(("bias", "offset", "scale")) else 0.6
    values = [scale(path) * sharded.normal(i, *leaf.shape) + (path[-1].key == "scale")
              for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(m.shapes))]  # fmt: skip
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(m.shapes), values), m.shardings)


def prompt(length):
    return np.random.RandomState(length).randint(0, shared.VOCAB, length).astype(np.int32)


def plain(config, params, ids, tokens, stride, context=SEQ):
    """Greedy by a full pass for each token. When the window is full, its oldest `stride` tokens go."""
    logits = jax.jit(functools.partial(reference.logits, config))
    ids = list(ids)
    window = list(ids)
    for _ in range(tokens):
        if len(window) > context:
            window = window[-(context - min(stride, context) + 1) :]
        padded = np.zeros((1, SEQ), np.int32)
        padded[0, : len(window)] = window
        last = np.asarray(logits(params, padded))[0, len(window) - 1]
        second, first = np.sort(last)[-2:]
        assert first - second > 1e-4  # no near tie, which rounding could turn
        ids.append(int(last.argmax()))
        window.append(ids[-1])
    return ids


@pytest.mark.parametrize("row", ROWS)
def test_a_cache_gives_the_text_of_full_passes(row):
    overrides, length, stride = ROWS[row]
    tokens = 2 * SEQ
    params = shared.on_host(parameters(**overrides))
    expected = plain(model(**overrides).config, params, prompt(length), tokens, stride)
    for name in ("1x1", "2x4"):
        sampling = dataclasses.replace(GREEDY, tokens=tokens, stride=stride)
        text = generator(name, **overrides).generate(parameters(name, **overrides), prompt(length), sampling)
        assert text.shape == (1, length + tokens)
        assert text[0].tolist() == expected
    assert len(set(expected[length:])) > 4
    forgetful = plain(model(**overrides).config, params, prompt(length), tokens, stride, context=SEQ - 1)
    assert forgetful != expected  # one token of context less is another text


def draw(name, **options):
    sampling = Sampling(**{"tokens": 12, "samples": 3, "temperature": 5.0, "top_p": 0.9} | options)
    return generator(name).generate(parameters(name), prompt(3), sampling)


def test_the_same_seed_gives_the_same_text_on_every_mesh():
    expected = draw("1x1")
    for name in ("4x2", "2x4"):
        np.testing.assert_array_equal(draw(name), expected)
    assert (draw("1x1", seed=1) != expected).any()
    assert len({tuple(row) for row in expected.tolist()}) == 3  # each sample goes its own way
    assert (expected[:, :3] == prompt(3)).all()


def test_the_first_tokens_do_not_depend_on_how_many_follow():
    np.testing.assert_array_equal(draw("1x1", tokens=7), draw("1x1")[:, :10])


def test_another_default_kind_of_random_numbers_changes_nothing():
    expected, key = draw("1x1"), shared.trainer(mesh="1x1").dropout_key(3)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw("1x1"), expected)
        np.testing.assert_array_equal(shared.trainer(mesh="1x1").dropout_key(3), key)


@functools.cache
def almost_uniform(vocab_size):
    """Ids after a prompt of two, of a model of 5 that is padded to 8, one window for each once the context is full."""
    options = Sampling(tokens=2 * SEQ, samples=16, temperature=1e6)
    return generator(vocab=5).generate(parameters(vocab=5), [1, 2], options, vocab_size)[:, 2:]


def test_ids_that_no_text_has_never_come_up():
    assert model(vocab=5).config.padded_vocab == 8
    assert set(almost_uniform(None).flatten()) == {0, 1, 2, 3, 4}
    assert set(almost_uniform(3).flatten()) == {0, 1, 2}


def test_every_token_is_drawn_with_a_key_of_its_own():
    columns = almost_uniform(None).T.tolist()
    assert all(columns[i] != columns[j] for i in range(2 * SEQ) for j in range(i))


# choose: the sets that tokens are drawn from.

LOGITS = np.log(np.array([0.05, 0.4, 0.1, 0.05, 0.3, 0.1], np.float32))
DRAWS = 4000


def frequencies(logits=LOGITS, **options):
    many = np.broadcast_to(logits, (DRAWS, len(logits)))
    drawing = Drawing.from_sampling(Sampling(**{"temperature": 1.0} | options))
    ids = jax.jit(generator_module.choose_tokens)(many, jax.random.split(jax.random.key(0), len(many)), drawing)
    assert ids.dtype == np.int32
    return np.bincount(ids, minlength=len(logits)) / DRAWS


def drawn(logits=LOGITS, **options):
    return set(np.flatnonzero(frequencies(logits, **options)).tolist())


def test_the_largest_is_found_as_argmax_and_drawn_as_jax_draws():
    logits = np.round(sharded.normal(0, 64, 50), 1)  # with equals
    logits[0, 0] = logits[1, 49] = np.inf
    logits[2, 7:] = -np.inf
    logits[3, 5] = np.nan
    np.testing.assert_array_equal(generator_module.find_largest(logits), jnp.argmax(logits, -1).at[3].set(0))
    drawing, keys = Drawing.from_sampling(Sampling(temperature=1.0)), jax.random.split(jax.random.key(0), 60)
    expected = jax.vmap(jax.random.categorical)(keys, jnp.asarray(logits[4:]))
    np.testing.assert_array_equal(generator_module.choose_tokens(logits[4:], keys, drawing), expected)
    assert (np.asarray(expected) != logits[4:].argmax(-1)).any()


@pytest.mark.parametrize("temperature", [1.0, 0.5, 2.0])
def test_temperature_divides_the_logits(temperature):
    expected = np.exp(LOGITS / temperature)
    expected /= expected.sum()
    assert np.abs(frequencies(temperature=temperature) - expected).max() < 0.03
    assert np.abs(frequencies(temperature=2 * temperature) - expected).max() > 0.05


def test_greedy():
    assert drawn(temperature=0) == {1}
    assert drawn(top_k=1, temperature=2.0) == {1}
    assert drawn(top_p=1e-6, temperature=2.0) == {1}
    assert drawn(np.zeros(4, np.float32), temperature=0) == {0}  # of equals the lowest, as accuracy counts


@pytest.mark.parametrize(
    ("top_k", "kept"),
    [(2, {1, 4}), (3, {1, 4, 2, 5}), (4, {1, 4, 2, 5}), (6, set(range(6))), (0, set(range(6))), (99, set(range(6)))],
)
def test_top_k_keeps_the_k_most_likely_and_what_equals_the_last(top_k, kept):
    assert drawn(top_k=top_k) == kept


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(0.39, {1}), (0.41, {1, 4}), (0.69, {1, 4}), (0.71, {1, 4, 2, 5}), (0.91, set(range(6))), (1.0, set(range(6)))],
)
def test_top_p_keeps_the_fewest_that_reach_it_and_what_equals_the_last(top_p, kept):
    assert drawn(top_p=top_p) == kept


def test_top_p_is_of_what_top_k_left():
    assert drawn(top_k=2, top_p=0.5) == {1}  # 0.4 of 0.7
    assert drawn(top_k=2, top_p=0.6) == {1, 4}
    left = frequencies(top_k=2)
    assert abs(left[1] - 4 / 7) < 0.03


def test_an_impossible_token_never_comes_up():
    logits = np.where(np.arange(6) == 1, -np.inf, LOGITS).astype(np.float32)
    for options in ({"temperature": 1e6}, {"top_k": 6}, {"top_p": 0.999}, {"temperature": 0}):
        assert 1 not in drawn(logits, **options)


@pytest.mark.parametrize("options", [{"temperature": 1e-39}, {"temperature": 1e-300}, {"top_p": 1e-300}])
def test_the_smallest_numbers_are_greedy(options):
    assert drawn(**options) == {1}
    assert drawn(LOGITS - 1e4, **options) == {1}


@pytest.mark.parametrize("temperature", [1e30, 1e39, 1e300])
def test_the_highest_temperature_draws_what_is_possible_alone(temperature):
    logits = np.where(np.arange(6) > 2, -np.inf, 50 * LOGITS).astype(np.float32)
    expected = np.array([1, 1, 1, 0, 0, 0]) / 3
    assert np.abs(frequencies(logits, temperature=temperature) - expected).max() < 0.03
    assert np.abs(frequencies(logits, temperature=1.0) - expected).max() > 0.1


def test_other_options_compile_nothing(monkeypatch):
    own, traced, prefill = Generator(model()), [], model().prefill
    monkeypatch.setattr(own.model, "prefill", lambda *args: traced.append(1) or prefill(*args))
    for options in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.5, "seed": 2}, {"tokens": 3 * SEQ, "stride": 3}):
        for length in (1, 3, SEQ + 1):
            own.generate(parameters(), prompt(length), Sampling(**{"tokens": 4} | options), vocab_size=shared.VOCAB - 1)
    assert len(traced) == 1
    own.generate(parameters(), prompt(3), Sampling(tokens=4, samples=2))  # another shape
    assert len(traced) == 2


def test_rows_are_drawn_apart():
    logits = np.zeros((64, 50), np.float32)
    assert (
        len(
            set(
                generator_module.choose_tokens(
                    logits, jax.random.split(jax.random.key(0), 64), Drawing.from_sampling(Sampling())
                ).tolist()
            )
        )
        > 20
    )


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
    """Each id's probability, by sorting, as a textbook would."""
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
    ids = jax.jit(generator_module.choose_tokens)(
        many, keys, Drawing.from_sampling(Sampling(**{"temperature": 1.0} | RULES[rule]))
    )
    counts = np.bincount(ids, minlength=len(LOGITS))
    assert chi_square(counts, allowed(RULES[rule])) < 20.5  # 5 degrees of freedom: one run in 1,000 has more
    slightly_warmer = allowed(RULES[rule] | {"temperature": 1.3 * RULES[rule].get("temperature", 1.0)})
    assert (slightly_warmer > 0).tolist() != (counts > 0).tolist() or chi_square(counts, slightly_warmer) > 20.5


def test_the_penalty_is_for_what_was_seen():
    logits = np.array([[2.0, 1.5, -1.0, -1.2]], np.float32)
    seen, one_key = np.array([[True, False, True, False]]), jax.random.split(jax.random.key(0), 1)
    most_likely = lambda penalty: int(
        generator_module.choose_tokens(
            logits, one_key, Drawing.from_sampling(Sampling(temperature=0, repetition_penalty=penalty)), seen
        )[0]
    )
    assert [most_likely(penalty) for penalty in (1.0, 1.3, 1.4)] == [0, 0, 1]  # 2 / 1.4 < 1.5
    keys = jax.random.split(jax.random.key(0), DRAWS)
    drawing = Drawing.from_sampling(Sampling(temperature=1.0, repetition_penalty=2.0))
    many = np.broadcast_to(logits, (DRAWS, 4))
    ids = generator_module.choose_tokens(many, keys, drawing, np.broadcast_to(seen, many.shape))
    expected = np.exp([1.0, 1.5, -2.0, -1.2]) / np.exp([1.0, 1.5, -2.0, -1.2]).sum()
    assert np.abs(np.bincount(ids, minlength=4) / DRAWS - expected).max() < 0.03


# Prompts of several lengths.

PROMPTS = [prompt(3), prompt(1), prompt(11), prompt(8), prompt(5)]


@pytest.mark.parametrize("name", ["1x1", "4x2"])
def test_a_ragged_batch_equals_one_by_one(name):
    """Across full contexts too, and whatever mesh the rows are split over."""
    sampling = Sampling(tokens=2 * SEQ, samples=2, temperature=3.0, top_p=0.9, repetition_penalty=1.2, stride=3)
    together = generator(name).continue_prompts(parameters(name), PROMPTS, sampling)
    alone = [row for p in PROMPTS for row in generator().continue_prompts(parameters(), [p], sampling)]
    assert [row.ids for row in together] == [row.ids for row in alone]
    np.testing.assert_allclose([row.logprobs for row in together], [row.logprobs for row in alone], atol=1e-4)
    assert len({tuple(row.ids) for row in together}) == len(together)


def test_parameters_that_dp_splits_write_the_same():
    """Every token gathers each layer, whether a step gathers it once or for each pass."""
    sampling = Sampling(tokens=SEQ, samples=2, temperature=3.0)
    expected = generator().continue_prompts(parameters(), PROMPTS[:2], sampling)
    for zero in (1, 3):
        found = generator("4x2", zero=zero).continue_prompts(parameters("4x2", zero=zero), PROMPTS[:2], sampling)
        assert [row.ids for row in found] == [row.ids for row in expected]


def test_logprobs_are_those_of_a_full_pass():
    (row,) = generator().continue_prompts(parameters(), [prompt(3)], Sampling(tokens=5, temperature=2.0, top_k=5))
    ids = [*prompt(3).tolist(), *row.ids]
    logits = np.asarray(reference.logits(model().config, shared.on_host(parameters()), np.array([ids], np.int32)))[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(row.logprobs, [logprobs[i + 2, ids[i + 3]] for i in range(5)], atol=1e-4)


def test_a_row_ends_where_it_should_and_others_go_on():
    sampling, heard = Sampling(tokens=12, temperature=5.0), {}
    free = generator().continue_prompts(parameters(), PROMPTS, sampling)
    last = free[1].ids[4]
    hear = lambda row, ids: heard.setdefault(row, []).extend(ids)
    rows = generator().continue_prompts(parameters(), PROMPTS, sampling, stops=lambda ids: ids[-1] == last, watch=hear)
    assert any(row.stopped for row in rows)
    for i, (row, whole) in enumerate(zip(rows, free, strict=True)):
        end = whole.ids.index(last) + 1 if last in whole.ids else 12
        assert row.ids == whole.ids[:end] == heard[i]
        assert row.stopped == (last in whole.ids)


@pytest.mark.parametrize(("bad", "message"), [([], "no tokens"), ([shared.VOCAB], "outside 0..60"), ([-1], "outside")])
def test_prompts_that_the_model_cannot_read(bad, message):
    with pytest.raises(UsageError, match=message):
        generator().continue_prompts(parameters(), [[1], bad], Sampling(tokens=1))


@pytest.mark.parametrize(
    "wrong",
    [{"tokens": 0}, {"samples": 0}, {"stride": 0}, {"top_k": -1}, {"top_p": 0.0}, {"top_p": 1.1},
     {"temperature": -1.0}, {"temperature": float("inf")}, {"temperature": float("nan")}, {"seed": -1},
     {"min_p": 1.5}, {"repetition_penalty": 0.0}],
)  # fmt: skip
def test_what_cannot_be_sampled_is_refused(wrong):
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Sampling(**wrong)


def test_a_row_that_ended_does_not_fill_the_context_of_others(monkeypatch):
    own = Generator(model())
    (first,) = own.continue_prompts(parameters(), [prompt(SEQ)], dataclasses.replace(GREEDY, tokens=1))
    reads, read = [], own._read
    monkeypatch.setattr(own, "_read", lambda *args, **kwargs: reads.append(1) or read(*args, **kwargs))
    sampling = dataclasses.replace(GREEDY, tokens=SEQ - 2)
    rows = own.continue_prompts(
        parameters(), [prompt(SEQ), prompt(1)], sampling, stops=lambda ids: ids == list(first.ids)
    )
    assert [len(row.ids) for row in rows] == [1, SEQ - 2]
    assert len(reads) == 2
