"""The table of chips, and the slices that it names."""

import re

import pytest

from shardformer.devices import chips
from shardformer.errors import UsageError


@pytest.mark.parametrize(
    ("text", "count"),
    [("v5e:4x4", 16), ("v4:2x2x2", 8), ("V5P:4x4x4", 64), ("h100:8", 8), ("tpu7x:2x2x1", 8), ("v3:2x2", 8)],
)
def test_slices(text, count):
    found = chips.parse_slice(text)
    assert found.count == count
    assert str(found) == text.lower()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "v9:2x2",
            "chip takes NAME:SHAPE with a name of v3, v4, v5e, v5p, v6e, tpu7x, a100, h100, h200, rtx4090, t4, a10g, "
            "l4, l40s, b200, mi300x; got 'v9:2x2'",
        ),
        ("v5f:2x2", "did you mean 'v5"),
        ("v5e:2x2x2", "v5e has 2 dimensions; write chip=v5e:2x4; got 'v5e:2x2x2'"),
        ("v5p:64", "v5p has 3 dimensions; write chip=v5p:4x4x4"),
        ("v5p", "write chip=v5p:2x2x2"),
        ("v5p:512x1x1", "write chip=v5p:8x8x8"),
        ("h100:2x4", "h100 has 1 dimension; write chip=h100:8"),
        ("v5e:0x4", "v5e has 2 dimensions"),
        ("v5e:4x2", "v5e has no slice of this shape, and its largest has 256 chips; write chip=v5e:2x4; got 'v5e:4x2'"),
        ("v5e:16x32", "write chip=v5e:16x16"),
        ("v3:2x4", "v3 has no slice of this shape, and its largest has 1,024 chips; write chip=v3:2x2"),
        ("v4:3x5x8", "v4 has no slice of this shape, and its largest has 4,096 chips; write chip=v4:4x4x8"),
        ("h100:99999", "99,999 chips; a plan is for at most"),
        ("v5e:" + "9" * 5000, "v5e has 2 dimensions"),
    ],
)
def test_a_wrong_slice_is_rejected_with_a_right_one(text, message):
    with pytest.raises(UsageError, match=re.escape(message)) as caught:
        chips.parse_slice(text)
    if advised := re.search(r"chip=(\S+);", str(caught.value)):
        assert chips.parse_slice(advised[1])


def test_larger_slices_are_sold_ones():
    assert [str(larger) for larger in chips.larger_slices(chips.parse_slice("v5e:4x4"))] == [
        "v5e:4x8", "v5e:8x8", "v5e:8x16", "v5e:16x16",
    ]  # fmt: skip
    assert next(chips.larger_slices(chips.parse_slice("v5p:4x4x4"))).shape == (4, 4, 8)


@pytest.mark.parametrize(
    ("kind", "name"),
    [("TPU v4", "v4"), ("TPU v5 lite", "v5e"), ("TPU v5", "v5p"), ("TPU v6 lite", "v6e"), ("TPU7x", "tpu7x"),
     ("NVIDIA H200", "h200"), ("NVIDIA A100-SXM4-80GB", "a100"), ("TPU v3", "v3"), ("Tesla T4", "t4"),
     ("NVIDIA A10G", "a10g"), ("NVIDIA L4", "l4"), ("NVIDIA L40S", "l40s"), ("AMD Instinct MI300X", "mi300x")],
)  # fmt: skip
def test_a_device_is_found_by_its_name_in_jax(kind, name):
    assert chips.find_chip(kind) is chips.CHIPS[name]
    assert chips.find_chip("cpu") is None


@pytest.mark.parametrize(
    ("kind", "name"),
    [("NVIDIA H100 80GB HBM3", "h100"), ("NVIDIA H100 PCIe", None), ("NVIDIA H100 NVL", None),
     ("NVIDIA H200 NVL", None), ("NVIDIA GH200 480GB", None), ("NVIDIA L40", None), ("NVIDIA A10", None)],
)  # fmt: skip
def test_a_card_with_a_similar_name_is_not_in_the_table(kind, name):
    assert chips.find_chip(kind) == (name and chips.CHIPS[name])


@pytest.mark.parametrize(("name", "gigabytes"), [("a100", 60), ("h100", 60), ("h200", 105.75)])
def test_a_gpu_has_the_memory_of_jax_and_names_assumptions(name, gigabytes):
    chip = chips.CHIPS[name]
    assert chip.memory == gigabytes * 1e9
    assert (chip.host, chip.network) == (8, 50e9)
    for words in ("75% of its ", "XLA_PYTHON_CLIENT_MEM_FRACTION", "assumed: nodes of 8 GPUs", "400 Gbit/s for each"):
        assert words in chip.source


@pytest.mark.parametrize(
    ("name", "gigahertz"), [("v3", 0.94), ("v4", 1.05), ("v5e", 1.5), ("v5p", 1.75), ("v6e", 1.75), ("tpu7x", 2.2)]
)
def test_the_peak_of_a_tpu_is_that_of_its_matrix_units(name, gigahertz):
    """The clocks are published; a peak of both cores for one would double its clock."""
    assert chips.CHIPS[name].clock == pytest.approx(gigahertz * 1e9, rel=0.01)


def test_the_rates_of_v6e_are_those_of_its_source():
    chip = chips.CHIPS["v6e"]
    assert (chip.wire, chip.bandwidth) == (400e9, 1600e9)
    assert chip.source == "docs.cloud.google.com/tpu/docs/v6e: ICI 800 GB/s, two ways"
