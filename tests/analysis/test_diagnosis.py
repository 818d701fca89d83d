"""Each mark that a mistake leaves in the numbers is found, and a right result has none."""

import numpy as np
import pytest

from shardformer.analysis.diagnosis import diagnose

SIZES = {"dp": 2, "mp": 4}
DRAW = np.random.default_rng(0)
SAME = np.broadcast_to(DRAW.normal(size=(2, 1, 3)), (2, 4, 3))  # equal along mp
OWN = DRAW.normal(size=(2, 4, 3))  # another block on each device
BIAS = np.broadcast_to(DRAW.normal(size=3), (2, 4, 3))
PARTS = DRAW.normal(size=(2, 4, 3))


def sentence(got, expected) -> str | None:
    return diagnose("y", got, expected, (24,), SIZES, {"bias": BIAS})


def summed(values, *dimensions):
    return np.broadcast_to(values.sum(dimensions, keepdims=True), values.shape)


@pytest.mark.parametrize(
    ("got", "expected", "words"),
    [
        (PARTS, summed(PARTS, 1), "A psum over mp is missing"),
        (PARTS, summed(PARTS, 0, 1), "A psum over dp and mp is missing"),
        (4 * SAME, SAME, "mp = 4 times too large"),
        (8 * SAME, SAME, "dp * mp = 8 times too large"),
        (SAME / 4, SAME, "mp = 4 times too small"),
        (1.5 * SAME, SAME, "is 1.5 times what it should be"),
        (summed(OWN, 1), OWN, "was summed over mp, whose devices hold different data"),
        (summed(PARTS, 0), summed(PARTS, 1), "summed over dp, whose devices hold other data, not over mp"),
        (np.broadcast_to(OWN[:, :1], OWN.shape), OWN, "holds the `y` of the first one"),
        (np.roll(OWN, 1, axis=1), OWN, "along mp, device i holds the `y` of device i - 1"),
        (np.flip(OWN, axis=1), OWN, "in reverse order"),
        (SAME + 3 * BIAS, SAME, "holds `bias` 4 times"),
        (SAME + BIAS, SAME, "holds `bias` 2 times"),
        (SAME - BIAS, SAME, "`y` lacks `bias`"),
        (0 * SAME, SAME, "is zero on every device"),
        (np.where(SAME > 0, np.nan, SAME), SAME, "is not finite"),
        (SAME + np.array([0, 0, 1, 0])[None, :, None], SAME, "wrong on the devices mp = 2"),
    ],
)
def test_mark_is_found(got, expected, words):
    assert words in sentence(got, expected)


def test_right_result_has_no_mark():
    assert sentence(OWN * (1 + 1e-6), OWN) is None


def test_full_result_in_place_of_a_block_is_named():
    words = diagnose("y", np.zeros((2, 4, 12)), np.zeros((2, 4, 3)), (12,), SIZES, {})
    assert "keep this device's own part" in words


def test_stacked_gather_is_named():
    words = diagnose("y", np.zeros((2, 4, 4, 3)), np.zeros((2, 4, 3)), (6, 3), SIZES, {})
    assert "there is one axis too many, of 4. lax.all_gather without tiled=True" in words
