"""The arithmetic of a step, counted by hand."""

import pytest

from shardformer import chips, flops
from shardformer.presets import preset
from tests import shared


def test_flops_count_causal_attention_once_and_no_embedding():
    config = shared.tiny(mesh="1x1")
    matrices = config.layers * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32) + 32 * 64 + 64 + 2 * 32
    assert flops.flops_per_token(config) == 6 * matrices + 6 * config.layers * config.seq * 32
    gptj = preset("gptj_6b")
    assert flops.flops_per_token(gptj) == pytest.approx(6 * 5.85e9 + 6 * 28 * 2048 * 4096, rel=0.01)


def test_all_of_the_peak_is_chips_times_flops_over_the_flops_of_a_token():
    config = shared.tiny(mesh="4x2")
    speed = flops.peak_tokens_per_second(config, chips.CHIPS["v4"])
    assert speed == pytest.approx(8 * 275e12 / flops.flops_per_token(config))
    assert f"{speed:,.0f} tokens/s" in flops.describe_peak(config, chips.CHIPS["v4"])
