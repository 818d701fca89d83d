"""The coordinate check: scale=completep moves the logits of all sizes equally far, and the usual rates do not."""

import pytest

from shardformer import run_command
from shardformer.analysis import coordinates
from shardformer.errors import UsageError
from tests import shared

NARROW = {"d_model": 16, "heads": 4, "layers": 1, "mesh": "1x1", "lr": 0.02, "warmup": 0, "init_std": None}


def last_changes(sizes, name, **keys):
    config = shared.tiny(**NARROW | keys)
    models = [coordinates.resize(config, name, size) for size in sizes]
    return [coordinates.measure(model, size, steps=4).changes[-1] for model, size in zip(models, sizes, strict=True)]


@pytest.mark.slow
def test_logits_of_wide_models_move_as_far_with_completep():
    narrow, wide = last_changes((16, 128), "d_model", scale="completep:16x1")
    assert 0.4 < wide / narrow < 1.2
    narrow, wide = last_changes((16, 128), "d_model")
    assert wide / narrow > 1.5


@pytest.mark.slow
def test_first_step_is_zero_without_a_rate():
    assert last_changes((16,), "d_model", lr=0.0, lr_min=0.0) == [0.0]


def test_wider_model_has_more_heads_of_the_same_size():
    config = shared.tiny(d_model=32, heads=8, kv_heads=2, d_ff=48)
    wide = coordinates.resize(config, "d_model", 64).model
    assert (wide.d_model, wide.heads, wide.kv_heads, wide.d_ff, wide.head_size) == (64, 16, 4, 96, 4)
    assert coordinates.resize(config, "layers", 5) == config.replace(layers=5)
    with pytest.raises(UsageError, match="d_model=40 would need a fraction of kv_heads=2 of d_model=32"):
        coordinates.resize(config, "d_model", 40)


def test_table_names_the_ratio():
    moved = [coordinates.Movement(64, [1.0, 2.0]), coordinates.Movement(128, [1.5, 5.0])]
    table = coordinates.format_movements("width", moved).splitlines()
    assert table[0].split() == ["width", "step", "1", "step", "2"]
    assert table[-1] == "after the last step, the largest change is 2.50 times the smallest"
    still = [coordinates.Movement(64, [0.0]), coordinates.Movement(128, [0.0])]
    assert coordinates.format_movements("width", still).endswith("the last step changed nothing")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "coordinates compares sizes; give widths=64,128,256 or depths=2,4,8, or both"),
        (["widths=64"], "widths takes two or more sizes, such as 64,128,256; got 64"),
        (["depths=2,x"], "depths takes two or more sizes, such as 64,128,256; got 2,x"),
        (["widths=32,64", "picture=c.txt"], "picture"),
        (["widths=32,64", "objective=dpo"], "trains with objective=lm and float weights, got objective=dpo"),
    ],
)
def test_wrong_sizes_are_rejected(words, message):
    with pytest.raises(UsageError, match=message):
        run_command("coordinates", "tiny", *words)
