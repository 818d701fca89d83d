"""A request has the same bits alone, among others, in any order of arrival, and by `Engine.run`, which generates.

The long form: SERVE_ORDERS=200 bash scripts/test.sh tests/inference/serve/test_engine.py
"""

import functools
import os
import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.inference.serve import engine as engine_module
from shardformer.inference.serve import jobs as jobs_module
from shardformer.inference.serve import slot_programs
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.jobs import Job, make_jobs
from shardformer.inference.serve.slot_pool import SlotPool
from shardformer.inference.serve.token_bias import TokenBias
from shardformer.parallel import context
from tests import shared, tiers
from tests.inference import test_generator
from tests.inference.test_generator import PROMPTS

ORDERS = int(os.environ.get("SERVE_ORDERS", 0))  # of arrival, in the long form
SIZES = {"seq": 32, "layers": 2, "window": 3, "window_pattern": "wf", "previous_tokens": 2}
TEXT = Sampling(tokens=2 * test_generator.SEQ, samples=2, temperature=3.0, top_p=0.9, repetition_penalty=1.2, stride=3)


@functools.cache
def engine(name="1x1", slots=4, **overrides):
    own = Engine(test_generator.model(name, **overrides), slots)
    return own, own.load(test_generator.parameters(name, **overrides))


def generate(prompts, sampling, name="1x1", slots=4, **overrides):
    own, weights = engine(name, slots, **overrides)
    jobs = make_jobs([list(map(int, prompt)) for prompt in prompts], sampling, weights)
    return [job.result() for job in own.run(jobs)]


CASES = {
    "context, t5 with windows": ("dp1.cp2.mp2", test_generator.ROWS["t5 with windows"][0]),
    "experts, shared heads": ("2x4", test_generator.ROWS["experts"][0] | {"kv_heads": 2}),
}
# Further meshes, for the long form.
MESHES = {
    "8x1": {},
    "1x8": {"heads": 8, "kv_heads": 2},
    "4x2": {"zero": 3, "positions": "learned", "block": "sequential"},
    "dp2.cp4.mp1": {"zero": 3},
    "dp2.cp2.mp2": {"positions": "alibi"},
    "dp1.cp8.mp1": {"rotary_theta": 50.0, "rotary_scaling": "longrope:5,1.2,1,1.1,1.2,1.3,2,3,4,5"},
    "dp1.cp2.mp4": test_generator.ROWS["experts"][0],
}


@pytest.fixture
def small_chunks(monkeypatch):
    """Reads contexts of 8 tokens in chunks of 4."""
    monkeypatch.setattr(slot_programs, "LONGEST_CHUNK", 4)
    monkeypatch.setattr(slot_programs, "SMALLEST_CACHE", 4)


def by_generator(overrides):
    return test_generator.generator(**overrides).continue_prompts(test_generator.parameters(**overrides), PROMPTS, TEXT)


@pytest.mark.slow
@pytest.mark.parametrize("case", ["context, t5 with windows", tiers.at_night("experts, shared heads")])
def test_texts_are_those_of_the_generator(case, small_chunks):
    """The texts outgrow the context; the two round differently, as the generator's rows have other slots."""
    name, overrides = CASES[case]
    found, expected = generate(PROMPTS, TEXT, name, 4, **overrides), by_generator(overrides)
    assert [row.ids for row in found] == [row.ids for row in expected]
    np.testing.assert_allclose([row.logprobs for row in found], [row.logprobs for row in expected], atol=1e-4)
    assert len({tuple(row.ids) for row in found}) > 4


@pytest.mark.slow
def test_chunk_in_another_order_changes_the_texts(broken, small_chunks):
    name, overrides = CASES["context, t5 with windows"]
    broken(context, "to_rows", lambda x, axis: x)
    own = Engine(test_generator.model(name, **overrides), 4)
    weights = own.load(test_generator.parameters(name, **overrides))
    texts = [job.ids for job in own.run(make_jobs([prompt.tolist() for prompt in PROMPTS], TEXT, weights))]
    assert texts != [row.ids for row in by_generator(overrides)]


# Random requests.


def scaled_parameters():
    return jax.tree.map(lambda leaf: leaf * np.asarray(1.5, leaf.dtype), test_generator.parameters(**SIZES))


@pytest.fixture(scope="module")
def chunked():
    """An engine with rows of 8 and of 32 tokens, which reads chunks of 8 through rings of 8 + 8 slots."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_programs, "LONGEST_CHUNK", 8)
        patch.setattr(slot_programs, "SMALLEST_CACHE", 8)
        patch.setattr(engine_module, "SMALLEST_POOL", 8)
        patch.setattr(jobs_module, "SPARE", 2)
        own, weights = engine.__wrapped__(**SIZES)
        yield own, [weights, own.load(scaled_parameters())]


def draw_job(rng, number, weights, longest):
    rules = [{"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.8}, {"repetition_penalty": 1.3}, {"min_p": 0.05}, {}]
    sampling = Sampling(**{"tokens": rng.randint(1, 20), "temperature": 2.0, "seed": rng.randrange(99)}
                        | rng.choice(rules))  # fmt: skip
    prompt = [rng.randrange(shared.VOCAB) for _ in range(rng.randint(1, longest))]
    end = rng.randrange(shared.VOCAB)
    bias = rng.choice([None, None, TokenBias(shared.VOCAB, {end: -3.0, 1: 4.0}, presence=1.0, frequency=0.5)])
    return Job(
        number, prompt, rng.randrange(3), sampling=sampling, weights=rng.choice(weights), top=rng.choice([0, 3]),
        stops=lambda ids: ids[-1] == end, scores_prompt=rng.random() < 0.2, bias=bias,
    )  # fmt: skip


def copy_of(job):
    return Job(job.number, job.prompt, job.sample, sampling=job.sampling, weights=job.weights, top=job.top,
               stops=job.stops, scores_prompt=job.scores_prompt, bias=job.bias)  # fmt: skip


def run_at_random(own, weights, seed, count=10):
    """Returns the jobs of a random order of arrival, with cancellations, of which none may keep a slot."""
    rng = random.Random(seed)
    todo, jobs = [draw_job(rng, number, weights, own.config.seq - 1) for number in range(count)], []
    while todo or not own.idle:
        for _ in range(min(rng.choice([0, 0, 1, 3]), len(todo))):
            jobs.append(todo.pop())
            own.submit(jobs[-1])
        if jobs and rng.random() < 0.1:
            own.cancel(rng.choice([job for job in jobs if not job.done] or [jobs[0]]))
        own.step(read_budget=rng.choice([1, 8, 24]), count=rng.choice([1, 2, 16]))
    assert not own.running
    assert not own.waiting
    return jobs


def describe(job):
    return job.ids, job.logprobs, job.stopped, job.prompt_scores


def differing(own, weights, seeds):
    """Returns the requests whose bits alone differ from those among others."""
    found = []
    for seed in seeds:
        for job in run_at_random(own, weights, seed):
            if not job.cancelled:
                (alone,) = own.run([copy_of(job)])
                found += [job] if describe(alone) != describe(job) else []
    return found


@pytest.mark.slow
def test_bits_do_not_depend_on_other_requests(chunked):
    assert not differing(*chunked, seeds=range(ORDERS or 8))


@pytest.mark.nightly
@pytest.mark.parametrize("case", CASES)
def test_bits_on_a_mesh_do_not_depend_on_other_requests(case, small_chunks):
    """Experts compute the tokens of all rows in the same blocks; a split context joins the results of its shards."""
    own, weights = engine(CASES[case][0], **CASES[case][1])
    assert not differing(own, [weights], seeds=[0])


@pytest.mark.skipif(not ORDERS, reason="the long form, which SERVE_ORDERS=200 runs")
@pytest.mark.parametrize("name", MESHES)
def test_bits_on_every_mesh_do_not_depend_on_other_requests(name, chunked):
    own, weights = engine(name, **SIZES | MESHES[name])
    assert not differing(own, [weights], seeds=range(min(ORDERS, 8)))


def test_row_that_idle_rows_overwrite_is_detected(chunked, broken):
    own, weights = chunked

    def forget_positions(self, jobs):
        draws = original(self, jobs)
        return draws._replace(position=np.where(draws.active, draws.position, 0))

    original = SlotPool._describe
    broken(SlotPool, "_describe", forget_positions)
    assert any(differing(own, weights, [seed]) for seed in range(3))


def test_logprobs_of_the_prompt_are_those_of_drawing(chunked):
    own, (weights, _) = chunked
    (drawn,) = own.run([Job(0, [1, 2, 3], 0, sampling=Sampling(tokens=20), weights=weights, top=3)])
    whole = Job(0, [1, 2, 3, *drawn.ids], 0, sampling=Sampling(tokens=1), weights=weights, top=3, scores_prompt=True)
    list(own.run([whole]))
    scores = [score for score, _ in whole.prompt_scores][2:]
    np.testing.assert_allclose(scores, drawn.logprobs, atol=1e-4)
    assert [len(top) for _, top in whole.prompt_scores] == [3] * 22


def test_weights_of_other_rows_do_not_mix(chunked):
    own, (weights, scaled) = chunked
    jobs = [Job(i, [1, 2], 0, sampling=Sampling(tokens=9, temperature=0), weights=w)
            for i, w in enumerate([weights, scaled, weights, scaled])]  # fmt: skip
    first, second, third, fourth = (job.ids for job in own.run(jobs))
    assert (first, second) == (third, fourth)
    assert first != second


def test_failing_stop_ends_only_its_request(chunked):
    own, (weights, _) = chunked

    def fail(ids):
        raise ValueError("no text")

    bad = Job(0, [1], 0, sampling=Sampling(tokens=3), weights=weights, stops=fail)
    good = Job(1, [1], 0, sampling=Sampling(tokens=3), weights=weights)
    list(own.run([bad, good]))
    assert str(bad.failure) == "no text"
    assert len(good.ids) == 3


def test_cancelled_job_leaves_an_equal_one_in_the_queue(chunked):
    own, (weights, _) = chunked
    first, second = (Job(0, [1], 0, sampling=Sampling(tokens=3), weights=weights) for _ in range(2))
    own.submit(first)
    own.submit(second)
    own.cancel(second)
    while not own.idle:
        own.step()
    assert [len(first.ids), len(second.ids)] == [3, 0]


def first_tokens(own, weights, prompts):
    """Returns the prompts' numbers in the order of their first tokens; one prompt arrives before each step."""
    order = []

    def watch(job, tokens):
        order.append(job.number)

    todo = [Job(i, prompt, 0, sampling=Sampling(tokens=2), weights=weights, watch=watch)
            for i, prompt in enumerate(prompts)]  # fmt: skip
    while todo or not own.idle:
        if todo:
            own.submit(todo.pop(0))
        own.step(read_budget=1)
    return list(dict.fromkeys(order))


LONG, SHORT = [1] * 30, [2] * 3


def test_short_prompt_does_not_wait_for_a_long_one(chunked):
    """The long prompt has four chunks, and waits for a few short ones only."""
    own, (weights, _) = chunked
    assert first_tokens(own, weights, [LONG, LONG, SHORT]) == [2, 0, 1]
    order = first_tokens(own, weights, [LONG, *[SHORT] * 40])
    assert 0 < order.index(0) < 40


def test_order_of_arrival_would_let_it_wait(chunked, broken):
    own, (weights, _) = chunked
    broken(Engine, "_rank", lambda self, job: (0.0, job.arrival))
    assert first_tokens(own, weights, [LONG, LONG, SHORT]) == [0, 1, 2]


def test_first_token_passes_rows_that_draw(chunked):
    """Rows in two pools and of two models draw; the new one waits for one of them at most."""
    own, (weights, scaled) = chunked
    running = [Job(i, prompt, 0, sampling=Sampling(tokens=2), weights=w)
               for i, (prompt, w) in enumerate([(SHORT, scaled), (LONG[:9], weights), (LONG[:9], scaled)])]  # fmt: skip
    for job in running:
        own.submit(job)
    own.step(read_budget=99, count=1)
    late = Job(9, [5], 0, sampling=Sampling(tokens=1), weights=weights)
    own.submit(late)
    for _ in range(3):
        own.step(count=1)
    assert late.done
    while not own.idle:
        own.step()
    assert [len(job.ids) for job in running] == [2] * 3


def count_copies(program, *arguments) -> int:
    """Returns how many copies of one of the caches of all rows a compiled program makes."""
    text = jax.jit(program, donate_argnums=0).lower(*arguments).compile().as_text()
    return len(re.findall(r"f32\[4,\d+,32,\d+\]\S* copy\(", text))


def test_replacing_a_row_copies_no_cache(chunked):
    """A program that also reads the row would copy the caches of all rows."""
    programs = chunked[0].programs
    state, row_D = programs.make_state(32), np.array([1], np.int32)
    new = jax.tree.map(lambda array: np.zeros((1, *array.shape[1:]), array.dtype), state[:2])
    seen_DV = np.zeros((1, state.seen_BV.shape[1]), bool)
    assert count_copies(programs._put_rows, state, row_D, new, seen_DV, row_D) == 0

    def read_and_put(state, row_D, shift):
        new = jax.tree.map(lambda array: jnp.roll(array[row_D] + shift.astype(array.dtype), 1, axis=-1), state[:2])
        return programs._put_rows(state, row_D, new, seen_DV, row_D), jax.tree.map(jnp.square, new)

    assert count_copies(read_and_put, state, row_D, np.float32(1)) > 0


@pytest.mark.parametrize(("prompt", "message"), [([], "no tokens"), ([shared.VOCAB], "outside"), ([-1], "outside")])
def test_unknown_ids_are_rejected(prompt, message):
    own, weights = engine()
    with pytest.raises(UsageError, match=message):
        own.submit(Job(0, prompt, 0, weights=weights))
    assert own.idle
