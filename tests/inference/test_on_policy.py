"""Log-probabilities of generated tokens are those of the training forward pass: the on-policy ratio is 1."""

import dataclasses
import functools

import jax
import numpy as np
import pytest

from shardformer.inference import Generator, Sampling
from shardformer.inference import generator as generator_module
from shardformer.model.measuring import Measures
from tests import shared

MOST = 1e-6  # of the ratio, in float32
SEQ, ROWS = 32, 16
WIDER = 2  # factor of the matrices, so that the next token depends on all of the context
DRAWINGS = (
    Sampling(tokens=12, samples=2, temperature=0.7, seed=3),
    Sampling(tokens=12, samples=2, temperature=1.5, top_p=0.8, top_k=20, seed=4),
)


def settings(mesh: str) -> dict:
    return {"mesh": mesh, "seq": SEQ, "batch": ROWS}


@functools.cache
def make_generator(mesh: str) -> Generator:
    return Generator(shared.trainer(**settings(mesh)).model)


@functools.cache
def measure(mesh: str):
    """Returns the compiled losses of every token in a training batch."""
    return jax.jit(Measures(shared.trainer(**settings(mesh)).model).token_loss)


def ratios(mesh: str, sampling: Sampling, batch: int) -> np.ndarray:
    """Returns the ratio of trained to generated probability of each token that follows prompts of many lengths."""
    draw = np.random.RandomState(0)
    prompts = [draw.randint(0, shared.VOCAB, length).tolist() for length in (1, 3, 8, 17, 20)]
    params = jax.tree.map(lambda p: WIDER * p if p.ndim > 1 else p, shared.initial_state(**settings(mesh)).params)
    rows = make_generator(mesh).continue_prompts(params, prompts, sampling, batch=batch)
    ids = np.zeros((ROWS, SEQ + 1), np.int32)
    every = [prompt for prompt in prompts for _ in range(sampling.samples)]
    for n, (prompt, row) in enumerate(zip(every, rows, strict=True)):
        ids[n, : len(prompt) + len(row.ids)] = prompt + row.ids
    nats = np.asarray(measure(mesh)(params, ids[:, :-1], ids[:, 1:]).nats_BT, np.float64)
    found = []
    for n, (prompt, row) in enumerate(zip(every, rows, strict=True)):
        trained = -nats[n, len(prompt) - 1 : len(prompt) - 1 + len(row.ids)]
        found.append(np.exp(trained - np.array(row.logprobs)))
    return np.concatenate(found)


@pytest.mark.slow
@pytest.mark.parametrize("sampling", DRAWINGS, ids=["temperature 0.7", "top_p"])
def test_generated_tokens_have_the_trained_probability(sampling):
    for batch in (3, ROWS):
        assert np.abs(ratios("4x2", sampling, batch) - 1).max() <= MOST


@pytest.mark.slow
def test_probability_after_temperature_is_noticed(monkeypatch):
    """The negative twin: log-probabilities of what was drawn from, as other samplers give, are not the model's."""
    log_softmax = jax.nn.log_softmax

    def scale(logits, axis):
        return log_softmax(logits / 0.7, axis=axis)

    monkeypatch.setattr(generator_module.jax.nn, "log_softmax", scale)
    make_generator.cache_clear()
    try:
        assert np.abs(ratios("1x1", dataclasses.replace(DRAWINGS[0], samples=1), ROWS) - 1).max() > 0.01
    finally:
        make_generator.cache_clear()
