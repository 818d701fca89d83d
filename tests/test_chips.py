"""The table of chips, and the slices that are named by it."""

import re

import pytest

from shardformer import chips
from shardformer.errors import UsageError


@pytest.mark.parametrize(("text", "count"), [("v5e:4x4", 16), ("v4:2x2x2", 8), ("V5P:4x4x4", 64), ("h100:8", 8)])
def test_slices(text, count):
    found = chips.parse_slice(text)
    assert found.count == count
    assert str(found) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:2x2", "chip takes NAME:SHAPE with a name of v4, v5e, v5p, v6e, a100, h100, h200; got 'v9:2x2'"),
        ("v5f:2x2", "did you mean 'v5"),
        ("v5e:2x2x2", "v5e has 2 dimensions; write chip=v5e:2x4; got 'v5e:2x2x2'"),
        ("v5p:64", "v5p has 3 dimensions; write chip=v5p:4x4x4"),
        ("v5p", "write chip=v5p:2x2x2"),
        ("v5p:512x1x1", "write chip=v5p:8x8x8"),
        ("h100:2x4", "h100 has 1 dimension; write chip=h100:8"),
        ("v5e:0x4", "v5e has 2 dimensions"),
        ("v5e:4x2", "v5e has no slice of this shape, and its largest has 256 chips; write chip=v5e:2x4; got 'v5e:4x2'"),
        ("v5e:16x32", "write chip=v5e:16x16"),
        ("v4:3x5x8", "v4 has no slice of this shape, and its largest has 4,096 chips; write chip=v4:4x4x8"),
        ("h100:99999", "99,999 chips; a plan is for at most"),
        ("v5e:" + "9" * 5000, "v5e has 2 dimensions"),
    ],
)
def test_what_is_not_a_slice_is_refused_with_one_that_is(text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        chips.parse_slice(text)
    if advised := re.search(r"chip=(\S+);", str(caught.value)):
        assert chips.parse_slice(advised[1])


def test_larger_slices_are_ones_that_there_are():
    assert [str(larger) for larger in chips.larger_slices(chips.parse_slice("v5e:4x4"))] == [
        "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16",
    ]  # fmt: skip
    assert next(chips.larger_slices(chips.parse_slice("v5p:4x4x4"))).shape == (4, 4, 8)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("NVIDIA H200", "h200"),
     ("NVIDIA A100-SXM4-80GB", "a100")],
)  # fmt: skip
def test_devices_by_the_name_that_jax_gives_them(kind, name):
    assert chips.find_chip(kind) is chips.CHIPS[name]
    assert chips.find_chip("cpu") is None
