"""A vector of /v1/embeddings is that of the text alone, of length 1, and follows its tokens."""

import base64
import json

import numpy as np
import pytest

pytest.importorskip("starlette")
pytest.importorskip("uvicorn")

from shardformer.inference.serve.jobs import Job
from tests.inference import test_generator
from tests.inference.serve.http_server import QUEUE, SIZES, SLOTS, ask, send

PATH = "/v1/embeddings"
TEXTS = ["to be", "or not", "é😀", "x" * 90]


def embed(port, **body) -> np.ndarray:
    return np.array([entry["embedding"] for entry in ask(port, body, PATH)["data"]], np.float32)


def test_vectors_have_length_1_and_differ(port):
    answer = ask(port, {"input": TEXTS, "model": "small"}, PATH)
    assert [entry["index"] for entry in answer["data"]] == [0, 1, 2, 3]
    assert answer["usage"] == {"prompt_tokens": 107, "total_tokens": 107}
    vectors = embed(port, input=TEXTS)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1, rtol=1e-6)
    assert len(np.unique(vectors[:, 0])) == 4
    assert vectors.shape[1] == test_generator.model(**SIZES).config.model.d_model


def test_vectors_do_not_depend_on_other_requests(service, port):
    together = embed(port, input=TEXTS)
    for text, vector in zip(TEXTS, together, strict=True):
        np.testing.assert_array_equal(embed(port, input=text)[0], vector)
    ids = service.codec.encode(TEXTS[1])
    np.testing.assert_array_equal(embed(port, input=ids), together[1:2])
    np.testing.assert_array_equal(embed(port, input=[ids, ids[:1]])[0], together[1])


def count_first_tokens(port) -> str:
    lines = send(port, "/metrics")[1].decode().splitlines()
    return next(line for line in lines if line.startswith("shardformer_first_token_seconds_count"))


def test_vector_is_no_first_token(port):
    before = count_first_tokens(port)
    embed(port, input="to be")
    assert count_first_tokens(port) == before
    ask(port, {"prompt": "to be", "max_tokens": 1})
    assert count_first_tokens(port) != before


def test_base64_is_the_same(port):
    (entry,) = ask(port, {"input": "to be", "encoding_format": "base64"}, PATH)["data"]
    vector = np.frombuffer(base64.b64decode(entry["embedding"]), "<f4")
    np.testing.assert_array_equal(vector, embed(port, input="to be")[0])


def test_dimensions_are_the_first_numbers(port):
    whole, short = embed(port, input="to be"), embed(port, input="to be", dimensions=5)
    np.testing.assert_allclose(short, whole[:, :5] / np.linalg.norm(whole[:, :5]), rtol=1e-6)
    assert short.shape == (1, 5)


def test_last_vector_gives_the_logits_and_mean_their_mean(service, generated):
    """The engine is this thread's while the server has no request."""
    engine, weights = service.thread.engine, service.models["small"].weights
    ids = [n % 256 for n in range(1, 90)]

    def pool(ids, pooling):
        (job,) = engine.run([Job(0, ids, 0, weights=weights, draws=False, pooling=pooling)])
        return job.pooled

    every = np.stack([pool(ids[: n + 1], "last") for n in range(len(ids))])
    np.testing.assert_allclose(pool(ids, "mean"), every.sum(axis=0), rtol=1e-3, atol=1e-3)
    assert not np.allclose(pool(ids, "mean"), len(ids) * every[-1], rtol=1e-3, atol=1e-3)
    params = test_generator.parameters(**SIZES)
    head = params["transformer/head"]
    (scored,) = engine.run([Job(0, [*ids, 5], 0, weights=weights, scores_prompt=True, draws=False)])
    logits = every[-1] @ np.asarray(head["w"], np.float64) + np.asarray(head.get("bias", 0.0), np.float64)
    logits = logits[: SIZES["vocab"]]
    logprob = logits[5] - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert scored.prompt_scores[-1][0] == pytest.approx(logprob, abs=1e-4)


WRONG = [
    ({}, "input", "input is missing"),
    ({"input": ""}, "input", "input is missing"),
    ({"input": []}, "input", "input is missing"),
    ({"input": {}}, "input", "expected text, token ids"),
    ({"input": ["a", 1]}, "input", "expected text, token ids"),
    ({"input": [[]]}, "input", "expected text, token ids"),
    ({"input": ["a", ""]}, "input", "input 1 is empty; leave it out"),
    ({"input": [999]}, "input", "outside 0..257"),
    ({"input": "\ud800"}, "input", "half of a character"),
    ({"input": "a" * 97}, "input", "97 tokens, more than the model's context, 96"),
    ({"input": ["a" * 97] * 4}, "input", "input 0 has 97"),
    ({"input": "a" * 1_000_000}, "input", "too many for a context"),
    ({"input": ["a"] * (QUEUE + SLOTS + 1)}, "input", "expected at most 12"),
    ({"input": "a", "dimensions": 0}, "dimensions", "expected 1 to 32"),
    ({"input": "a", "dimensions": 33}, "dimensions", "expected 1 to 32"),
    ({"input": "a", "encoding_format": "int8"}, "encoding_format", "expected float or base64"),
    ({"input": "a", "pooling": "max"}, "pooling", "expected last or mean"),
    ({"input": "a", "n": 1}, "n", "not a field"),
]


@pytest.mark.parametrize(("body", "param", "message"), WRONG)
def test_wrong_request_is_named(port, body, param, message):
    status, content = send(port, PATH, body)
    error = json.loads(content)["error"]
    assert (status, error["param"]) == (400, param)
    assert message in error["message"]


def test_unknown_model_is_named(port):
    assert send(port, PATH, {"input": "a", "model": "other"})[0] == 404
