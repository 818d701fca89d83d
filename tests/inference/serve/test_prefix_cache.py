"""A request has the same bits with the chunks of earlier requests as without them, alone and among others."""

import collections
import dataclasses
import random
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from shardformer.config.sampling_keys import Sampling
from shardformer.inference.serve import engine as engine_module
from shardformer.inference.serve import jobs as jobs_module
from shardformer.inference.serve import slot_programs
from shardformer.inference.serve.engine import Engine
from shardformer.inference.serve.jobs import Job, Weights
from shardformer.inference.serve.prefix_cache import PrefixCache
from tests import shared
from tests.inference import test_generator
from tests.inference.serve.test_engine import copy_of, describe, scaled_parameters
from tests.surroundings import before_call

SIZES = {"seq": 32, "layers": 2, "window": 3, "window_pattern": "wf", "previous_tokens": 2}
PLENTY = 2**20
SYSTEM = [(7 * i) % shared.VOCAB for i in range(19)]


@pytest.fixture(scope="module")
def engines():
    """An engine with a prefix cache and one without, each with the weights of two models; chunks of 4 tokens."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slot_programs, "LONGEST_CHUNK", 4)
        patch.setattr(slot_programs, "SMALLEST_CACHE", 4)
        patch.setattr(engine_module, "SMALLEST_POOL", 32)
        patch.setattr(jobs_module, "SPARE", 2)
        own = Engine(test_generator.model(**SIZES), 3, prefix_bytes=PLENTY)
        plain = Engine(test_generator.model(**SIZES), 3)
        plain.programs = own.programs  # so that each is compiled once
        for pool in plain._pools:
            pool.programs = own.programs
        yield own, plain, [own.load(test_generator.parameters(**SIZES)), own.load(scaled_parameters())]


@pytest.fixture
def own(engines):
    """Returns the first engine with an empty cache."""
    engines[0].prefixes.clear()
    engines[0].prefixes.found_tokens = 0
    return engines[0]


def make_job(weights, prompt, **fields):
    sampling = Sampling(tokens=3, temperature=2.0, repetition_penalty=1.3)
    return Job(0, prompt, 0, sampling=sampling, weights=weights, **fields)


def run(engine, *jobs):
    return [describe(job) for job in engine.run(map(copy_of, jobs))]


def found_after(own, *jobs) -> list[int]:
    """Returns how many tokens each of these jobs, one after the other, found in the cache."""
    found, before = [], own.prefixes.found_tokens
    for job in jobs:
        run(own, job)
        found.append(own.prefixes.found_tokens - before)
        before = own.prefixes.found_tokens
    return found


@pytest.mark.parametrize("length", [3, 8, 9, 19])
def test_second_request_reads_only_what_differs(own, engines, length):
    """The last token is read each time, for its logits."""
    _, plain, (weights, _) = engines
    prompt = SYSTEM[:length]
    jobs = [make_job(weights, prompt), make_job(weights, prompt), make_job(weights, [*prompt, 1, 2])]
    assert [run(own, job) for job in jobs] == [run(plain, job) for job in jobs]
    again, longer = {3: (0, 0), 8: (4, 8), 9: (8, 8), 19: (18, 16)}[length]  # 21 tokens end in other chunks than 19
    assert own.prefixes.found_tokens == again + longer


def test_equal_prompts_that_arrive_together_are_read_once(own, engines):
    _, plain, (weights, _) = engines
    jobs = [make_job(weights, SYSTEM)] * 3
    assert run(own, *jobs) == run(plain, *jobs)
    assert own.prefixes.found_tokens == 2 * 18


def test_other_weights_find_nothing(own, engines):
    _, plain, (weights, scaled) = engines
    jobs = [make_job(weights, SYSTEM), make_job(scaled, SYSTEM)]
    assert [run(own, job) for job in jobs] == [run(plain, job) for job in jobs]
    assert own.prefixes.found_tokens == 0


def test_scores_of_a_prompt_are_read_from_no_cache(own, engines):
    """What is scored is read by another program, whose chunks are not stored."""
    _, plain, (weights, _) = engines
    jobs = [make_job(weights, SYSTEM, scores_prompt=True), make_job(weights, SYSTEM)]
    assert [run(own, job) for job in [*jobs, *jobs]] == [run(plain, job) for job in [*jobs, *jobs]]
    assert found_after(own, jobs[0]) == [18]  # when it is read again to draw


def test_least_recently_used_chunks_go_first(own, engines, monkeypatch):
    """The first chunks of a context go last: the cache keeps the beginning of one that is too long for it."""
    first, second, third = (make_job(engines[2][0], [i, *SYSTEM[:8]]) for i in (1, 2, 3))
    run(own, first)
    size = own.prefixes.bytes // 2
    monkeypatch.setattr(own.prefixes, "_most_bytes", 4 * size)
    assert found_after(own, second, first, third) == [0, 8, 0]
    assert own.prefixes.bytes == 4 * size
    assert found_after(own, first, third, second) == [8, 8, 0]
    monkeypatch.setattr(own.prefixes, "_most_bytes", 3 * size)
    assert found_after(own, first, second, first) == [0, 4, 4]
    long = make_job(engines[2][0], SYSTEM)
    assert found_after(own, long, long) == [0, 12]


def test_chunk_larger_than_the_cache_is_not_stored(own, engines, monkeypatch):
    monkeypatch.setattr(own.prefixes, "_most_bytes", 1)
    assert found_after(own, *[make_job(engines[2][0], SYSTEM)] * 2) == [0, 0]
    assert own.prefixes.bytes == 0


def test_failed_step_empties_the_cache(own, engines):
    run(own, make_job(engines[2][0], SYSTEM))
    own.reset()
    assert own.prefixes.bytes == 0
    assert found_after(own, make_job(engines[2][0], SYSTEM)) == [0]


def draw_prompt(rng) -> list[int]:
    """Returns a prompt that begins as some others do."""
    prompt = [rng.randrange(2), *SYSTEM][: rng.randint(1, 20)]
    return [*prompt, *(rng.randrange(shared.VOCAB) for _ in range(rng.randint(0, 10)))]


def differing(engines, seeds) -> list[Job]:
    """Returns the jobs of random orders of arrival, with a cache that is too small, whose bits it changes."""
    own, plain, weights = engines
    result = []
    for seed in seeds:
        rng, jobs = random.Random(seed), []
        own.prefixes._most_bytes = rng.choice([2**13, 2**15, PLENTY])
        for number in range(8):
            sampling = Sampling(tokens=rng.randint(1, 9), temperature=2.0, seed=number)
            jobs.append(Job(number, draw_prompt(rng), 0, sampling=sampling, weights=rng.choice(weights),
                            scores_prompt=rng.random() < 0.2))  # fmt: skip
        todo = collections.deque(jobs)
        while todo or not own.idle:
            for _ in range(min(rng.choice([0, 1, 3]), len(todo))):
                own.submit(todo.popleft())
            own.step(read_budget=rng.choice([1, 4, 8]), count=rng.choice([1, 2]))
        result += [job for job in jobs if [describe(job)] != run(plain, job)]
    own.prefixes._most_bytes = PLENTY
    return result


def test_bits_in_company_do_not_depend_on_the_cache(own, engines):
    assert not differing(engines, seeds=range(4))
    assert own.prefixes.found_tokens > 50


def test_chunk_of_other_tokens_is_detected(own, engines, broken):
    def forget_beginning(self, job, programs):
        return {position: str(job.seen[position : position + 4]).encode() for position in original(self, job, programs)}

    original = PrefixCache.name_chunks
    broken(PrefixCache, "name_chunks", forget_beginning)
    assert differing(engines, seeds=range(4))


def test_rings_of_windows_are_restored(own, engines):
    """A chunk lies in consecutive slots of each ring, also after it has wrapped around."""
    programs = own.programs
    slots = [cache.k_BhSK.shape[2] for cache in programs.make_state(32).caches]
    assert slots == [8, 32, 8]  # of the ids for previous_tokens last
    state, position_D = programs.make_state(32), np.array([8], np.int32)
    chunk = jax.tree.map(lambda x: np.ones((1, x.shape[1], 4, x.shape[3]), x.dtype), state.caches)
    state = programs.restore(state, np.array([1], np.int32), position_D, chunk)
    for cache, first in zip(state.caches, (0, 8, 0), strict=True):
        filled = np.asarray(cache.k_BhSK).any(axis=(1, 3))
        assert np.argwhere(filled).tolist() == [[1, slot] for slot in range(first, first + 4)]


def test_names_depend_on_size_weights_and_length():
    """With longrope, rows of more than 20 tokens have other frequencies."""

    def name_chunks(weights=0, prompt=SYSTEM, size=32):
        job = Job(0, prompt, 0, weights=SimpleNamespace(number=weights), size=size, seen=prompt)
        model = SimpleNamespace(config=SimpleNamespace(model=SimpleNamespace(longest_short_row=20)))
        programs = SimpleNamespace(model=model, choose_chunk=lambda length, position: 4, least_stored=lambda length: 1)
        return PrefixCache(PLENTY).name_chunks(job, programs)

    long = [*SYSTEM, 1, 2]
    names = [*name_chunks(), *name_chunks(weights=1), *name_chunks(size=64), *name_chunks(prompt=long)]
    assert names == [0, 4, 8, 12] * 3 + [0, 4, 8, 12, 16]
    parts = [name_chunks(), name_chunks(weights=1), name_chunks(size=64), name_chunks(prompt=long)]
    assert len({name for part in parts for name in part.values()}) == 4 + 4 + 4 + 5
    assert name_chunks(prompt=[9, *SYSTEM[1:]])[4] != name_chunks()[4]
    assert name_chunks(prompt=[*SYSTEM[:8], *SYSTEM[8:][::-1]])[4] == name_chunks()[4]


def test_weights_never_share_a_number():
    one = Weights({})
    assert one.number != Weights({}).number != dataclasses.replace(one).number != one.number


def test_mesh_that_splits_rows_has_no_cache():
    assert Engine(test_generator.model("2x1", seq=8), 2, prefix_bytes=PLENTY).prefixes is None
    assert Engine(test_generator.model("1x2", seq=8), 2, prefix_bytes=PLENTY).prefixes is not None


def test_engine_without_a_cache_copies_no_chunk(engines, monkeypatch):
    _, plain, (weights, _) = engines

    def fail(*arguments, **keys):
        raise AssertionError("a chunk is copied")

    before_call(monkeypatch, plain.programs, "take", fail)
    before_call(monkeypatch, plain.programs, "restore", fail)
    assert len(run(plain, *[make_job(weights, SYSTEM)] * 2)) == 2


def test_vectors_are_those_of_all_tokens(engines):
    """Stored chunks of the same beginning are read again, as their vectors are not stored."""
    own, plain, (weights, _) = engines
    ids = list(range(1, 12))
    list(own.run([Job(0, ids, 0, sampling=Sampling(tokens=1), weights=weights)]))

    def pool(engine, ids, pooling):
        (job,) = engine.run([Job(0, ids, 0, weights=weights, draws=False, pooling=pooling)])
        return job.pooled

    mean = pool(own, ids, "mean")
    np.testing.assert_array_equal(mean, pool(plain, ids, "mean"))
    last = [pool(plain, ids[: n + 1], "last") for n in range(len(ids))]
    np.testing.assert_allclose(mean, np.sum(last, axis=0), rtol=0, atol=1e-4 * np.abs(last).max())
    np.testing.assert_array_equal(pool(own, ids, "last"), last[-1])
