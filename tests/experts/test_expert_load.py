"""The load of experts, from counts of the pairs of a token and an expert."""

import numpy as np
import pytest

from shardformer.experts.expert_load import describe_load


def test_load_of_each_layer():
    load = describe_load(np.array([[4.0, 4, 4, 4], [8, 8, 0, 0]]), (0, 2))
    assert load["largest_share_layer_0"] == 0.25
    assert load["entropy_layer_0"] == pytest.approx(1)
    assert load["without_tokens_layer_0"] == 0
    assert load["largest_share_layer_2"] == 0.5
    assert load["entropy_layer_2"] == pytest.approx(0.5)
    assert load["without_tokens_layer_2"] == 2
