"""The mesh axes of experts, by bytes and room; the groups of layers that a scan runs if only some have experts."""

import pytest

from shardformer.devices.chips import CPU, Hardware
from shardformer.experts import expert_layout
from shardformer.experts.expert_layout import choose_expert_axes, find_groups
from shardformer.experts.grouped_product import Blocks, Copies, Kernel
from shardformer.layout import resolve, specs
from tests import shared

MANY = {"mesh": "4x2", "experts": 64, "experts_per_token": 2, "expert_width": 64, "bias": "none", "d_model": 64}


def test_few_tokens_are_sent_instead_of_matrices():
    choice = choose_expert_axes(shared.tiny(**MANY))
    assert choice.axes == ("mp", "dp")
    # 4 passes x 3 other shards x 32 tokens x 64 x 4 bytes; 2 matrices x 32 experts x 64 x 64 x 8 bytes x 3 / 4
    assert choice.reason.startswith("0.0983 MB of tokens a layer, 1.573 MB of matrices and gradients; room for")


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"batch": 4096}, "50.33 MB of tokens a layer"),
        ({"accum": 1, "batch": 512, "zero": 3, "experts_per_token": 8}, "room for"),
        ({"zero": 3, "weights": "nf4", "lora_rank": 2, "batch": 256}, "0.1966 MB of matrices and gradients"),
        ({"mesh": "1x8"}, "one shard of dp"),
        ({"expert_axes": "mp"}, "expert_axes=mp"),
        ({"experts": 6}, "experts=6 do not divide over 8"),
    ],
)
def test_matrices_stay_on_the_shards_of_mp(changes, reason):
    choice = choose_expert_axes(shared.tiny(**MANY | changes))
    assert choice.axes == ("mp",)
    assert reason in choice.reason


def test_layout_and_specs_follow_the_choice():
    config = shared.tiny(**MANY)
    assert resolve(config).expert_axes == ("mp", "dp")
    assert specs.parameter_spec("transformer/layers/expert_up", config)[1] == ("mp", "dp")
    assert specs.parameter_spec("transformer/layers/expert_up", config.replace(expert_axes="mp"))[1] == "mp"


@pytest.mark.parametrize(
    ("kinds", "multiple", "groups"),
    [
        ("dededede", 1, (0, 2)),
        ("deeeeeee", 1, (1, 1)),  # DeepSeek's
        ("ddeeeee", 1, (2, 1)),
        ("deeeeee", 2, (1, 2)),  # of two types of windows
        ("deedeed", 1, (0, 3)),
        ("dedeed", 1, (1, 3)),
        ("d", 1, (0, 1)),
    ],
)
def test_groups_repeat_after_the_first_layers(kinds, multiple, groups):
    first, period = find_groups(tuple(kind == "e" for kind in kinds), multiple)
    assert (first, period) == groups
    assert all(kinds[i] == kinds[i + period] for i in range(first, len(kinds) - period))


def test_loop_names_its_groups():
    layout = resolve(shared.tiny(mesh="1x1", bias="none", experts=4, layers=6, dense_first=1, expert_pattern="ed"))
    assert layout.reasons["loop"] == "experts in some layers: 0 layers unrolled, then a scan of 3 groups of 2 layers"
    assert not resolve(shared.tiny(mesh="1x1", bias="none", experts=4)).loop.period


@pytest.mark.parametrize(
    ("platform", "training", "prefill", "token"),
    [
        ("cpu", Blocks(256), Blocks(256), Blocks(8)),
        ("gpu", Copies(512), Blocks(256), Blocks(8)),  # rows of an expert: 1,024
        ("tpu", Kernel(256), Kernel(256), Kernel(128)),
    ],
)
def test_product_is_chosen_by_the_device(platform, training, prefill, token):
    config = shared.tiny(mesh="1x1", bias="none", experts=16, experts_per_token=2, seq=512, batch=16, accum=1)
    layout = resolve(config, Hardware(platform) if platform != "cpu" else CPU)
    assert layout.experts == training
    found = expert_layout.layouts_of_generation(layout, layout.experts)
    assert [it.experts for it in found] == [it._replace(joins_rows=True) for it in (prefill, token)]


def test_jax_without_megablox_computes_blocks_on_a_tpu(monkeypatch):
    config = shared.tiny(mesh="1x1", bias="none", experts=16, experts_per_token=2, seq=512, batch=16, accum=1)
    monkeypatch.setattr(expert_layout, "MEGABLOX", "jax.experimental.pallas.ops.tpu.moved")
    assert expert_layout.choose_grouped_product(config, Hardware("tpu")) == (
        Blocks(256), "this JAX has no kernel of MegaBlox",
    )  # fmt: skip


@pytest.mark.parametrize(("seq", "block"), [(32, 128), (2048, 1024), (1, 32)])
def test_blocks_of_copies_grow_with_the_rows_of_an_expert(seq, block):
    config = shared.tiny(mesh="1x1", bias="none", experts=16, experts_per_token=2, seq=seq, batch=16, accum=1)
    assert resolve(config, Hardware("gpu", 9.0)).experts == Copies(block)
