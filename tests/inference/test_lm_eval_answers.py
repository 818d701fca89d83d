"""Questions of an evaluation get the answers of plain full passes; lm-eval itself is not needed."""

import functools
import sys

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.data import hf_tokenizer
from shardformer.errors import UsageError
from shardformer.inference.lm_eval_answers import Answers, Question
from shardformer.inference.text_codec import TextCodec
from tests import shared
from tests.inference import test_generator
from tests.inference.test_generator import SEQ, model, parameters
from tests.inference.test_scoring import plain

pytest.importorskip("tokenizers")
VOCAB = 288
TEXT = "the cat sat on the mat, and the other cats that sat there thought that this was their mat. "


@functools.cache
def tokenizer():
    return hf_tokenizer.train_bpe([TEXT * 3], VOCAB)


@functools.cache
def answers(rows=3):
    return Answers(model(vocab=VOCAB), parameters(vocab=VOCAB), TextCodec(tokenizer()), rows)


def ids(text):
    return tokenizer().encode(text).tolist()


def plainly(context, targets):
    return plain(context, targets, vocab=VOCAB)


PAIRS = [
    ("the cat", " sat"),
    ("", "the mat"),  # nothing before it
    ("the cat ", "sat on"),  # the space belongs to what follows
    ("  ", "mat"),
    ("th", "e"),  # one token when joined, in which nothing of the continuation is left
    (TEXT, " the cat"),  # longer than the context
    ("on", TEXT[:60]),
]


def expected_pair(context, continuation):
    """Scores the joined text's tokens after those of the context without its last spaces."""
    words = context.rstrip()
    before, whole = ids(words), ids(context + continuation)
    return plainly(before or [tokenizer().end_of_text], whole[len(before) :])


@pytest.mark.slow
def test_pairs_are_scored_as_by_plain_passes():
    assert len(ids(TEXT)) > SEQ
    assert len(ids("th")) == len(ids("the"))
    found = answers().score_pairs(PAIRS)
    for pair, score in zip(PAIRS, found, strict=True):
        nats, greedy = expected_pair(*pair)
        assert score.nats == pytest.approx(nats, abs=1e-4), pair
        assert score.greedy == greedy
    assert found[4] == (0.0, True)
    wrong = plainly(ids("the cat "), ids("sat on"))[0]  # cut at the space
    assert abs(found[2].nats - wrong) > 1e-2


def test_the_text_of_the_model_is_greedy():
    (written,) = answers().continue_prompts([Question("the cat", {"max_gen_toks": 1})])
    right, wrong = answers().score_pairs([("the cat", written), ("the cat", " sat" if written != " sat" else " on")])
    assert right.greedy
    assert not wrong.greedy


def test_batch_size_changes_no_answer():
    alone, together = (answers(rows).score_pairs(PAIRS) for rows in (1, 3))
    np.testing.assert_allclose([score.nats for score in together], [score.nats for score in alone], atol=1e-5)
    assert [score.greedy for score in together] == [score.greedy for score in alone]


def test_whole_texts_are_scored_token_by_token():
    long, empty = answers().score_documents([TEXT, ""])
    assert long.nats == pytest.approx(plainly([tokenizer().end_of_text], ids(TEXT))[0], abs=1e-4)
    assert empty.nats == 0


def greedy(prompt, count):
    """Generates by full passes."""
    found = test_generator.plain(model(vocab=VOCAB).config, shared.on_host(parameters(vocab=VOCAB)), prompt, count, 1)
    return found[len(prompt) :]


@pytest.mark.slow
def test_continuations_are_those_of_full_passes():
    free, prompts = {"max_gen_toks": 4, "until": []}, ["the cat", TEXT, "", "mat, and"]
    whole = answers().continue_prompts([Question(prompt, free) for prompt in prompts])
    assert whole[0] == tokenizer().decode(greedy(ids("the cat"), 4))
    assert whole[1] == tokenizer().decode(greedy(ids(TEXT)[-(SEQ - 4) :], 4))
    assert whole[2] == tokenizer().decode(greedy([tokenizer().end_of_text], 4))
    stop = whole[0][1:3]
    cut = answers(1).continue_prompts([Question(prompt, {"until": stop, "max_gen_toks": 4}) for prompt in prompts])
    assert cut == [text.partition(stop)[0] for text in whole]
    assert cut[0] != whole[0]
    warm = {"max_gen_toks": 4, "do_sample": True, "temperature": 50.0}
    drawn = answers().continue_prompts([Question("the cat", warm), Question("the cat", free)])
    assert drawn[1] == whole[0] != drawn[0]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_gen_toks": SEQ}, f"max_gen_toks={SEQ} leaves no room for a prompt in seq={SEQ}"),
        ({"num_beams": 4}, "generation_kwargs have num_beams"),
        ({"max_gen_toks": 2, "do_sample": True, "top_p": 2.0}, "top_p must be above 0"),
    ],
)
def test_unknown_settings_are_rejected_by_name(settings, message):
    with pytest.raises(UsageError, match=message):
        answers().continue_prompts([Question("the", settings)])


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("tasks= names no task", []),
        ("include=nowhere is not a folder", ["tasks=a", "include=nowhere"]),
        ("log_samples does nothing without out", ["tasks=a", "log_samples=true"]),
        ("batch must be at least 1", ["tasks=a", "batch=0"]),
        ("pip install 'shardformer[eval]'", ["tasks=a"]),
    ],
)
def test_invalid_arguments_are_rejected_in_one_line(message, words, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "lm_eval", None)  # as where it is not installed
    assert main(["harness", "run", *words]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_first_of_several_limits_counts():
    one = {"max_gen_toks": 3}
    both = one | {"max_new_tokens": SEQ, "max_tokens": None}
    given = [answers().continue_prompts([Question("the cat", settings)]) for settings in (one, both)]
    assert given[0] == given[1]


def test_null_settings_have_no_effect():
    limit = {"max_gen_toks": 2}
    nulls = limit | {"until": None, "top_k": None, "temperature": None}
    given = [answers().continue_prompts([Question("the", settings)]) for settings in (limit, nulls)]
    assert given[0] == given[1]


@pytest.mark.parametrize(("name", "value"), [("temperature", "warm"), ("max_gen_toks", "many"), ("top_p", [1])])
def test_a_setting_that_is_not_a_number_is_named(name, value):
    with pytest.raises(UsageError, match=f"have {name}=.*, expected a number"):
        answers().continue_prompts([Question("the", {name: value})])
