"""Scores and texts of a context that is split over cp equal those of one device, and broken twins do not."""

import dataclasses
import functools
import math

import jax
import numpy as np
import pytest

from shardformer.analysis import memory
from shardformer.inference.generator import Generator
from shardformer.inference.scoring import Request, Scorer
from shardformer.kernels.attention import Attention
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.parallel import context
from shardformer.parallel.context import SplitContext
from tests import tiers
from tests.inference import test_generator
from tests.inference.test_generator import GREEDY, prompt

SIZES = {"seq": 32, "layers": 2}
T5 = {"positions": "t5", "window": 3, "window_pattern": "wf", "attention_cap": 2.0}
SPLITS = {"dp1.cp2.mp2": T5, "dp2.cp4.mp1": {"kv_heads": 2, "zero": 3}}
PROMPTS = [prompt(length).tolist() for length in (20, 3, 9)]
TEXT = dataclasses.replace(GREEDY, tokens=20, stride=5)  # the first row outgrows the context


def new_model(name, **overrides):
    """Returns a model that no other test has compiled, so that it may be broken."""
    config = test_generator.model(name, **SIZES, **overrides).config
    return Model.on(config, mesh.make(config))


def write(m, **overrides):
    """Returns the ids of each prompt's text."""
    params = test_generator.parameters(m.config.parallel.mesh, **SIZES, **overrides)
    return [row.ids for row in Generator(m).continue_prompts(params, PROMPTS, TEXT)]


def score(m, **overrides):
    params = test_generator.parameters(m.config.parallel.mesh, **SIZES, **overrides)
    requests = [Request(ids[:2], ids[2:]) for ids in (prompt(50).tolist(), *PROMPTS)]  # the first has two windows
    return np.array(Scorer(m, 2).score(params, requests))


@functools.cache
def one_device(action, name):
    return action(test_generator.model("1x1", **SIZES, **SPLITS[name]), **SPLITS[name])


@pytest.mark.slow
def test_split_cache_writes_the_text_of_one_device():
    """test_decoding_exactly.py has the logits after each token, on cp=2 and cp=4."""
    name = "dp1.cp2.mp2"
    assert write(new_model(name, **SPLITS[name]), **SPLITS[name]) == one_device(write, name)


@pytest.mark.parametrize("name", tiers.shorten(SPLITS))
def test_split_rows_have_the_scores_of_one_device(name):
    found, expected = (score(new_model(name, **SPLITS[name]), **SPLITS[name]), one_device(score, name))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


def put_everywhere(self, cached_BgSK, new_B1gK, slot):
    """Stores a token on every shard, where it is counted once for each."""
    return Attention.put(self, cached_BgSK, new_B1gK, slot % cached_BgSK.shape[2])


@pytest.mark.slow
def test_a_token_that_every_shard_stores_is_detected(broken):
    broken(SplitContext, "put", put_everywhere)
    assert write(new_model("dp1.cp2.mp2", **T5), **T5) != one_device(write, "dp1.cp2.mp2")


def test_tokens_in_another_order_change_the_scores(broken):
    broken(context, "to_rows", lambda x, axis: x)
    off = score(new_model("dp1.cp2.mp2", **T5), **T5) - one_device(score, "dp1.cp2.mp2")
    assert np.abs(off).max() > 1  # nat


@pytest.mark.slow
def test_each_shard_holds_its_part_of_a_cache():
    m = new_model("dp2.cp4.mp1")
    tokens, lengths = jax.ShapeDtypeStruct((2, 8), np.int32), jax.ShapeDtypeStruct((2,), np.int32)
    program = jax.jit(lambda *args: Decoder(m).prefill(*args, 8, 30)).lower(m.abstract, tokens, lengths).compile()
    caches = program.output_shardings[1]
    shapes = [sharding.shard_shape((2, 4, 32, 8)) for sharding in jax.tree.leaves(caches)]
    assert shapes == [(1, 4, 8, 8)] * 4  # 30 slots are rounded up to 32
    assert memory.cache_bytes(m.config) == 4 * sum(map(math.prod, shapes))
