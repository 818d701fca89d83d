"""Biases and penalties are those of OpenAI's formula, and wrong ones are named."""

import numpy as np
import pytest

from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.token_bias import read_bias


def encode(text: str) -> list[int]:
    return list(text.encode())


def read(**fields):
    return read_bias(fields, 128, encode)


def test_penalties_count_the_drawn_tokens():
    """logit - frequency * count - presence * (count > 0), as OpenAI documents it."""
    bias = read(presence_penalty=0.5, frequency_penalty=0.25, logit_bias={"4": 3, "9": -100})
    np.testing.assert_array_equal(np.flatnonzero(bias([])), [4, 9])
    found = bias([4, 7, 4, 4])
    assert found.dtype == np.float32
    assert {int(i): float(found[i]) for i in np.flatnonzero(found)} == {4: 3 - 0.5 - 0.75, 7: -0.75, 9: -100}


def test_keys_are_ids_or_texts():
    """llama.cpp biases each token of a text; digits are an id."""
    assert read(logit_bias={"ab": 1, "5": 2, " 7": 3, "1.": 4}).listed == {97: 1, 98: 1, 5: 2, 7: 3, 49: 4, 46: 4}


@pytest.mark.parametrize("fields", [{}, {"presence_penalty": 0}, {"logit_bias": {}}, {"logit_bias": {"foo": 0}}])
def test_zero_is_no_bias(fields):
    assert read(**fields).is_zero
    assert not read(**fields, frequency_penalty=-2).is_zero


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"logit_bias": {"128": 1}}, "token id 128, outside 0..127"),
        ({"logit_bias": {"-1": 1}}, "token id -1, outside 0..127"),
        ({"logit_bias": {"9999999999": 1}}, "token id 9999999999, outside"),
        ({"logit_bias": {"a" * 1001: 1}}, "1,001 characters"),
        ({"logit_bias": {"é": 1}}, "token id 195, outside 0..127"),
        ({"logit_bias": {"5": True}}, "expected a number"),
        ({"logit_bias": {"5": float("nan")}}, "expected a number"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "1,025 entries"),
        ({"presence_penalty": -2.5}, "expected -2 to 2"),
    ],
)
def test_wrong_bias_is_named(fields, message):
    with pytest.raises(ApiError, match=message) as caught:
        read(**fields)
    assert caught.value.param == next(iter(fields))
