"""Decoding with a cache gives the tokens of plain full passes, on every mesh and in every batch."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import dense_reference as reference
from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.inference import generator as generator_module
from shardformer.inference.generator import Generator
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from tests import meshes, sharded, shared, tiers
from tests.surroundings import before_call, counting_compilations

SEQ = 8
GREEDY = Sampling(temperature=0)

WINDOWS = {"window": 3, "attention_cap": 2.0}
LATENT = {"bias": "none", "kv_latent": 12, "head_dim": 6, "rotary_dims": 2, "value_dim": 5}
EXPERTS = {"bias": "none", "activation": "swiglu", "d_ff": 32, "balance_rate": 0.1}
# (config, prompt length, stride); every text outgrows the context.
ROWS = {
    "rotary, parallel, scanned": ({}, 3, 1),
    "learned, sequential, unrolled": ({"positions": "learned", "block": "sequential", "scan": False}, 1, 3),
    "t5, sequential, scanned": ({"positions": "t5", "block": "sequential"}, 8, 1),
    "none, parallel, unrolled": ({"positions": "none", "scan": False, "tied": True}, 11, 20),
    "windows, unrolled": (
        WINDOWS
        | {"window_pattern": "wf", "window_rotary_theta": 50.0, "sinks": True, "scan": False, "previous_tokens": 2},
        6,
        1,
    ),
    "windows, scanned": (WINDOWS | {"window_pattern": "fw", "kv_heads": 2, "sinks": True}, 1, 3),
    "t5 with windows": (WINDOWS | {"window_pattern": "fw", "positions": "t5", "previous_tokens": 3}, 5, 2),
    "chunks": (
        {"window": 3, "window_chunks": True, "window_pattern": "wn", "qk_norm": "rotated_plain", "rotary_theta": 50.0}
        | {"query_growth": 0.5, "query_growth_tokens": 3},
        6,
        1,
    ),
    "layers without rotary": ({"window_pattern": "fn", "rotary_theta": 50.0}, 3, 1),
    "longrope, longer than its short rows": (
        {"rotary_theta": 50.0, "rotary_scaling": "longrope:5,1.2,1,1.1,1.2,1.3,2,3,4,5"},
        3,
        2,
    ),
    "latents": (LATENT | {"q_latent": 10, "attention_scale": 0.7, "scan": False}, 3, 1),
    "latents, windows": (LATENT | WINDOWS | {"window_pattern": "wf", "block": "sequential"}, 6, 2),
    "experts": (EXPERTS | {"experts": 4, "shared_width": 8, "shared_gate": True}, 3, 1),
    "experts, widths split": (
        EXPERTS | {"dense_first": 1, "experts": 6, "router": "sigmoid", "expert_bias": True, "block": "sequential"},
        5,
        2,
    ),
}


OVER_DP = {"experts over dp": (EXPERTS | {"experts": 4, "expert_axes": "dp"},)}


def model(name="1x1", **overrides):
    return model_of(shared.tiny(**{"mesh": name, "seq": SEQ, "heads": 4, "batch": 8} | overrides))


@functools.cache
def model_of(config):
    return Model.on(config, mesh.make(config))


def generator(name="1x1", **overrides):
    return generator_of(model(name, **overrides))


generator_of = functools.cache(Generator)


def parameters(name="1x1", **overrides):
    """Returns matrices larger than any initialisation, so that the next token depends on all of the context."""
    return parameters_of(model(name, **overrides))


@functools.cache
def parameters_of(m):

    def scale(path):
        return 0.1 if path[-1].key.endswith(("bias", "offset", "scale")) else 0.6

    values = [scale(path) * sharded.normal(i, *leaf.shape) + (path[-1].key == "scale")
              for i, (path, leaf) in enumerate(jax.tree.leaves_with_path(m.shapes))]  # fmt: skip
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(m.shapes), values), m.shardings)


def prompt(length):
    return np.random.RandomState(length).randint(0, shared.VOCAB, length).astype(np.int32)


@functools.cache
def full_pass(config):
    """Returns the dense reference in float64, which is traced once for each length; nothing is compiled."""
    traced_once = jax.jit(functools.partial(reference.logits, config), inline=True)
    return lambda params, ids: exact.run(traced_once, params, ids).outputs


def plain(config, params, ids, tokens, stride, context=SEQ):
    """Generates greedily by a full pass for each token; a full window drops its oldest `stride` tokens."""
    logits = full_pass(config)
    ids = list(ids)
    window = list(ids)
    for _ in range(tokens):
        if len(window) > context:
            window = window[-(context - min(stride, context) + 1) :]
        padded = np.zeros((1, len(window) if config.model.longest_short_row else SEQ), np.int32)
        padded[0, : len(window)] = window
        last = np.asarray(logits(params, padded))[0, len(window) - 1]
        second, first = np.sort(last)[-2:]
        assert first - second > 1e-4  # no near tie, which rounding could turn
        ids.append(int(last.argmax()))
        window.append(ids[-1])
    return ids


# test_decoding_exactly.py has all rows; test_logprobs_equal_those_of_a_full_pass compiles experts. A mesh does not
# change when a context is read again.
COMPILED = ("rotary, parallel, scanned", "longrope, longer than its short rows", "t5 with windows")


@pytest.mark.parametrize("row", tiers.shorten(COMPILED, 2))
def test_cached_decoding_equals_full_passes(row):
    overrides, length, stride = ROWS[row]
    tokens = 2 * SEQ
    params = shared.on_host(parameters(**overrides))
    expected = plain(model(**overrides).config, params, prompt(length), tokens, stride)
    for name in ("1x1", "2x4") if row == COMPILED[0] else ("1x1",):
        sampling = dataclasses.replace(GREEDY, tokens=tokens, stride=stride)
        text = generator(name, **overrides).generate(parameters(name, **overrides), prompt(length), sampling)
        assert text.shape == (1, length + tokens)
        assert text[0].tolist() == expected
    assert len(set(expected[length:])) > 4
    forgetful = plain(model(**overrides).config, params, prompt(length), tokens, stride, context=SEQ - 1)
    assert forgetful != expected  # one token of context less is another text


def test_caches_are_as_long_as_windows():
    m = model(**WINDOWS | {"window_pattern": "wf"})
    tokens, lengths = jax.ShapeDtypeStruct((2, 4), np.int32), jax.ShapeDtypeStruct((2,), np.int32)
    for cache_size, slots in ((8, [3, 8]), (2, [2, 2])):
        _, caches = jax.eval_shape(
            lambda *args, size=cache_size: Decoder(m).prefill(*args, 4, size), m.abstract, tokens, lengths
        )
        assert [cache.k_BhSK.shape[2] for cache in caches] == [cache.v_BhSK.shape[2] for cache in caches] == slots


def draw(name, **options):
    sampling = Sampling(**{"tokens": 12, "samples": 3, "temperature": 5.0, "top_p": 0.9} | options)
    return generator(name).generate(parameters(name), prompt(3), sampling)


@pytest.mark.slow
def test_a_seed_gives_one_text_on_a_mesh():
    expected = draw("1x1")
    np.testing.assert_array_equal(draw("2x4"), expected)
    assert (draw("1x1", seed=1) != expected).any()
    assert len({tuple(row) for row in expected.tolist()}) == 3  # samples differ
    assert (expected[:, :3] == prompt(3)).all()


def test_first_tokens_do_not_depend_on_the_number_of_tokens():
    np.testing.assert_array_equal(draw("1x1", tokens=7), draw("1x1")[:, :10])


def test_draws_do_not_depend_on_the_default_prng():
    expected, key = draw("1x1"), shared.trainer(mesh="1x1").dropout_key(3)
    with jax.default_prng_impl("rbg"):
        np.testing.assert_array_equal(draw("1x1"), expected)
        np.testing.assert_array_equal(shared.trainer(mesh="1x1").dropout_key(3), key)


@functools.cache
def almost_uniform(vocab_size):
    """Returns ids [48, 2 SEQ] that a model draws almost uniformly, of as many rows at a time as `draw`."""
    options = Sampling(tokens=2 * SEQ, samples=48, temperature=1e6, stride=5)
    rows = generator().continue_prompts(parameters(), [[1, 2]], options, vocab_size, batch=4)
    return np.array([row.ids for row in rows])


def test_padded_and_unknown_ids_are_never_drawn():
    assert model().config.model.padded_vocab == 64
    assert set(almost_uniform(None).flatten()) == set(range(shared.VOCAB))
    assert set(almost_uniform(3).flatten()) == {0, 1, 2}


def test_every_token_is_drawn_with_its_own_key():
    columns = almost_uniform(None).T.tolist()
    assert all(columns[i] != columns[j] for i in range(2 * SEQ) for j in range(i))


@pytest.mark.slow
def test_other_sampling_values_do_not_recompile(monkeypatch):
    own, traced = Generator(model()), []
    before_call(monkeypatch, own.decoder, "prefill", lambda *_: traced.append(1))
    own.compile(own.model.abstract, prompt(1), Sampling(tokens=4), shared.VOCAB)
    with counting_compilations() as compiled:
        own.generate(parameters(), prompt(1), Sampling(tokens=4), vocab_size=shared.VOCAB - 1)
    assert not [name for name in compiled if "_context" in name or "_tokens" in name or "_layers" in name]
    for options in ({"temperature": 0}, {"top_k": 3}, {"top_p": 0.5, "seed": 2}, {"tokens": 3 * SEQ, "stride": 3}):
        for length in (1, 3, SEQ + 1):
            own.generate(parameters(), prompt(length), Sampling(**{"tokens": 4} | options), vocab_size=shared.VOCAB - 1)
    assert len(traced) == 1
    own.generate(parameters(), prompt(3), Sampling(tokens=4, samples=2))  # another shape
    assert len(traced) == 2


# Prompts of several lengths.

PROMPTS = [prompt(3), prompt(1), prompt(11), prompt(8), prompt(5)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1x1", "4x2"])
def test_a_ragged_batch_equals_single_prompts(name):
    """The texts outgrow the context."""
    sampling = Sampling(tokens=2 * SEQ, samples=2, temperature=3.0, top_p=0.9, repetition_penalty=1.2, stride=3)
    together = generator(name).continue_prompts(parameters(name), PROMPTS, sampling)
    alone = [row for p in PROMPTS for row in generator().continue_prompts(parameters(), [p], sampling)]
    assert [row.ids for row in together] == [row.ids for row in alone]
    np.testing.assert_allclose([row.logprobs for row in together], [row.logprobs for row in alone], atol=1e-4)
    assert len({tuple(row.ids) for row in together}) == len(together)


@pytest.mark.slow
def test_zero_shards_give_the_same_text():
    sampling = Sampling(tokens=SEQ, samples=2, temperature=3.0)
    expected = generator().continue_prompts(parameters(), PROMPTS[:2], sampling)
    found = generator("4x2", zero=3).continue_prompts(parameters("4x2", zero=3), PROMPTS[:2], sampling)
    assert [row.ids for row in found] == [row.ids for row in expected]


@pytest.mark.parametrize(("row", "name"), tiers.shorten([("", "1x1"), ("experts over dp", "2x2")]))
def test_logprobs_equal_those_of_a_full_pass(row, name):
    overrides, sampling = (ROWS | OVER_DP)[row][0] if row else {}, Sampling(tokens=5, temperature=2.0, top_k=5)
    params = parameters(name, **overrides)
    (text,) = generator(name, **overrides).continue_prompts(params, [prompt(3)], sampling)
    ids = [*prompt(3).tolist(), *text.ids]
    config = model(name, **overrides).config
    logits = meshes.compute_logits(config, params, np.array([ids], np.int32))[0]
    logprobs = np.asarray(jax.nn.log_softmax(logits, axis=-1))
    np.testing.assert_allclose(text.logprobs, [logprobs[i + 2, ids[i + 3]] for i in range(5)], atol=1e-4)


def test_a_stopped_row_does_not_stop_the_others():
    sampling, heard = Sampling(tokens=12, temperature=5.0), {}
    prompts = PROMPTS[:4]  # as many rows as `draw`
    free = generator().continue_prompts(parameters(), prompts, sampling)
    last = free[1].ids[4]

    def hear(row, ids):
        heard.setdefault(row, []).extend(ids)

    rows = generator().continue_prompts(parameters(), prompts, sampling, stops=lambda ids: ids[-1] == last, watch=hear)
    assert any(row.stopped for row in rows)
    for i, (row, whole) in enumerate(zip(rows, free, strict=True)):
        end = whole.ids.index(last) + 1 if last in whole.ids else 12
        assert row.ids == whole.ids[:end] == heard[i]
        assert row.stopped == (last in whole.ids)


@pytest.mark.parametrize(("bad", "message"), [([], "no tokens"), ([shared.VOCAB], "outside 0..60"), ([-1], "outside")])
def test_prompts_of_unknown_ids_are_rejected(bad, message):
    with pytest.raises(UsageError, match=message):
        generator().continue_prompts(parameters(), [[1], bad], Sampling(tokens=1))


@pytest.mark.slow
def test_an_ended_row_does_not_fill_the_context_of_others(monkeypatch):
    own = generator()
    (first,) = own.continue_prompts(parameters(), [prompt(SEQ)], dataclasses.replace(GREEDY, tokens=1))
    reads = []
    before_call(monkeypatch, own, "_read", lambda *_, **__: reads.append(1))
    sampling = dataclasses.replace(GREEDY, tokens=SEQ - 2)
    rows = own.continue_prompts(
        parameters(), [prompt(SEQ), prompt(1)], sampling, stops=lambda ids: ids == list(first.ids)
    )
    assert [len(row.ids) for row in rows] == [1, SEQ - 2]
    assert len(reads) == 2


@pytest.mark.slow
def test_logprobs_include_entries_that_the_tokenizer_lacks():
    """A model may have more entries than its tokenizer, as GPT-J's 50,400 beside 50,257."""
    known = 7
    (row,) = generator().continue_prompts(parameters(), [[1, 2]], Sampling(tokens=3, temperature=2.0), known)
    logits = meshes.compute_logits(model().config, parameters(), np.array([[1, 2, *row.ids]], np.int32))[0]
    every, some = (np.asarray(jax.nn.log_softmax(logits[:, :size], axis=-1)) for size in (shared.VOCAB, known))
    np.testing.assert_allclose(row.logprobs, [every[i + 1, row.ids[i]] for i in range(3)], atol=1e-4)
    assert min(some[i + 1, row.ids[i]] - row.logprobs[i] for i in range(3)) > 0.1


@pytest.mark.slow
def test_batch_bounds_the_rows_of_one_pass(monkeypatch):
    own, rows = generator(), []
    before_call(monkeypatch, own, "_read", lambda params, ids, *_, **__: rows.append(len(ids)))
    sampling = Sampling(tokens=3, samples=8, temperature=5.0)  # 16 rows, as many as the ragged batch has
    found = list(own.stream(parameters(), PROMPTS[:2], sampling, batch=4))
    assert set(rows) == {4}
    together = own.continue_prompts(parameters(), PROMPTS[:2], sampling)
    assert [row.ids for row in found] == [row.ids for row in together]


@pytest.mark.slow
def test_a_stream_computes_only_the_rows_that_are_taken(monkeypatch):
    own, passes = generator(), []
    before_call(monkeypatch, own, "_read", lambda *_, **__: passes.append(1))
    rows = own.stream(parameters(), [[1]], Sampling(tokens=2, samples=50_000), batch=4)
    assert [next(rows) for _ in range(4)]
    assert len(passes) == 1


def test_draws_do_not_depend_on_the_size_of_chunks(monkeypatch):
    expected = draw("1x1")
    monkeypatch.setattr(generator_module, "CHUNK", 2)
    sampling = Sampling(tokens=12, samples=3, temperature=5.0, top_p=0.9)
    own = Generator(model())
    own._read = generator()._read  # reads a context in the same way
    np.testing.assert_array_equal(own.generate(parameters(), prompt(3), sampling), expected)


def test_loaded_parameters_are_split_into_layers_once(monkeypatch):
    own, params, calls = generator(), parameters(), []
    expected = own.generate(params, prompt(3), GREEDY)
    loaded = own.load(params)
    monkeypatch.setattr(own, "_unstack_layers", calls.append)
    np.testing.assert_array_equal(own.generate(loaded, prompt(3), GREEDY), expected)
    assert not calls


def test_drawing_copies_no_cache():
    """`kernels/test_attend_to_cache.py` has the loops that do."""
    own, params = generator(), parameters()
    row = generator_module.Row(0, [1, 2], 0)
    *arguments, sample_B, drawn_B, slots = own._place_rows([row], [row.context], SEQ)
    decoding = own._read(params, *arguments, cache_size=slots)
    values = generator_module._list_values(GREEDY, 1, 0, 8)
    drawing = own._draw.lower(own._unstack_layers(params), decoding, sample_B, drawn_B, *values)
    heads, slots, size = decoding.caches[0].k_BhSK.shape[1:]
    copies = re.findall(rf"f32\[(?:\d+,)?{heads},{slots},{size}\]\S* copy\(", drawing.compile().as_text())
    assert len(copies) == 0
