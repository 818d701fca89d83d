"""Rows that wait while others draw keep their caches, their logits and the tokens that they have seen."""

import dataclasses

import numpy as np
import pytest

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.serve import engine as engine_module
from shardformer.inference.serve import slot_programs
from shardformer.inference.serve.jobs import Job
from shardformer.inference.serve.token_bias import TokenBias
from tests.inference.serve.test_engine import SIZES, copy_of, engine, scaled_parameters

RULES = Sampling(tokens=12, temperature=2.0, repetition_penalty=1.5)


@pytest.fixture(scope="module")
def small():
    """Returns an engine that reads chunks of 8 tokens, and the weights of two models."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_programs, "LONGEST_CHUNK", 8)
        patch.setattr(slot_programs, "SMALLEST_CACHE", 8)
        patch.setattr(engine_module, "SMALLEST_POOL", 32)
        own, weights = engine.__wrapped__(**SIZES)  # not one that other tests have made with other sizes
        yield own, (weights, own.load(scaled_parameters()))


def test_rows_that_wait_stay_as_they_are(small):
    """One prompt is read in chunks while others draw; rows of another model wait for each other's turns."""
    own, (weights, scaled) = small
    jobs = [
        Job(0, [1, 2, 3], 0, sampling=RULES, weights=weights), Job(1, [4, 5], 0, sampling=RULES, weights=scaled),
        Job(2, list(range(3, 23)), 0, sampling=RULES, weights=weights),
    ]  # fmt: skip
    for job in jobs:
        own.submit(job)
    while not own.idle:
        own.step(read_budget=8, count=1)
    for job in jobs:
        (alone,) = own.run([copy_of(job)])
        assert (job.ids, job.logprobs) == (alone.ids, alone.logprobs)
        assert len(job.ids) == RULES.tokens


def test_biases_change_their_own_row_only(small):
    """Rows without a bias have the bits that they have alone, and so has the row with one."""
    own, (weights, _) = small
    plain = [Job(i, [1, 2, 3 + i], 0, sampling=RULES, weights=weights) for i in range(2)]
    bias = TokenBias(own.vocab_size, {7: 30.0}, presence=0.5, frequency=2.0)
    biased = Job(2, [1, 2, 3], 0, sampling=RULES, weights=weights, bias=bias)
    for job in (*plain, biased):
        own.submit(job)
    while not own.idle:
        own.step()
    for job in (*plain, biased):
        (alone,) = own.run([copy_of(job)])
        assert (job.ids, job.logprobs) == (alone.ids, alone.logprobs)
    assert 2 <= biased.ids.count(7) < RULES.tokens  # until its penalty outweighs its bias


def test_forbidden_tokens_are_never_drawn(small):
    """Each draw has one possible token, which follows from the one before."""
    own, (weights, _) = small

    def allow_next(ids):
        return np.where(np.arange(own.vocab_size) == (ids[-1] + 1 if ids else 3), 0, -np.inf)

    rules = dataclasses.replace(RULES, top_p=0.5, top_k=3, min_p=0.1)
    for sampling in (rules, dataclasses.replace(rules, temperature=0)):
        (job,) = own.run([Job(0, [1], 0, sampling=sampling, weights=weights, bias=allow_next)])
        assert job.ids == list(range(3, 15))


def test_failing_bias_ends_only_its_request(small):
    own, (weights, _) = small

    def fail(ids):
        raise ValueError("no token")

    good = Job(1, [1], 0, sampling=RULES, weights=weights)
    bad = Job(0, [1], 0, sampling=RULES, weights=weights, bias=fail)
    list(own.run([bad, good]))
    assert str(bad.failure) == "no token"
    assert len(good.ids) == RULES.tokens


def test_a_stream_of_first_tokens_holds_nobody_up(small):
    """Each step ends the reading of a new prompt, whose first token is drawn without a pass."""
    own, (weights, _) = small
    long = Job(0, [1, 2, 3], 0, sampling=RULES, weights=weights)
    own.submit(long)
    own.step(count=1)
    for arrival in range(4):
        short = Job(1 + arrival, [4, 5], 0, sampling=dataclasses.replace(RULES, tokens=1), weights=weights)
        own.submit(short)
        own.step(read_budget=8, count=1)
        assert (len(short.ids), len(long.ids)) == (1, 2 + arrival)
    while not own.idle:
        own.step()
    (alone,) = own.run([copy_of(long)])
    assert (long.ids, long.logprobs) == (alone.ids, alone.logprobs)


def test_first_logits_stay_while_another_model_draws(small):
    """One row has read its prompt and has drawn nothing; a row of another model draws."""
    own, (weights, scaled) = small
    drawing = Job(0, [1, 2, 3], 0, sampling=RULES, weights=weights)
    waiting = Job(1, [4, 5], 0, sampling=RULES, weights=scaled)
    own.submit(drawing)
    own.step(count=1)
    own.submit(waiting)
    own._admit()
    (pool,) = own._pools
    pool.read([waiting])
    assert waiting.fresh
    assert pool.draw(weights, [drawing], count=2) == 2
    while not own.idle:
        own.step()
    (alone,) = own.run([copy_of(waiting)])
    assert (waiting.ids, waiting.logprobs) == (alone.ids, alone.logprobs)
