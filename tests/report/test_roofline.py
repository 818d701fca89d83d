"""How fast a step can be at best, by hand."""

import pytest

from shardformer import chips
from shardformer.report import roofline
from tests import shared

V5E = chips.parse_slice("v5e:1x1")


def compute(**overrides) -> float:
    """The FLOPs of a token by which a step's arithmetic is timed."""
    config = shared.tiny(mesh="1x1", **overrides)
    return roofline.predict_times(config, V5E, 0, []).compute * V5E.chip.flops / (config.batch * config.seq)


def test_frozen_weights_take_two_thirds_and_their_forward_pass_again_takes_as_much_as_any():
    """With adapters, the forward pass that remat=full repeats is near a half of a step and no third."""
    matrices = 2 * (4 * 32 * 32 + 2 * 32 * 128 + 128 + 3 * 32) + 32 * 64 + 64 + 2 * 32
    attention = 2 * 16 * 32
    adapters = 2 * 4 * (32 + 32)
    assert compute() == pytest.approx(6 * matrices + 6 * attention)
    assert compute(remat="full") == pytest.approx(8 * matrices + 8 * attention)
    lora = {"lora_rank": 4, "lora_targets": "q"}
    assert compute(**lora) == pytest.approx(4 * matrices + 6 * adapters + 6 * attention)
    assert compute(**lora, remat="full") == pytest.approx(6 * matrices + 8 * adapters + 8 * attention)
