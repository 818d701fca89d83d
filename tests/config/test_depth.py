"""`depth=N`: what follows from one number, and keys that are given in place of it."""

import json

import pytest

from shardformer.__main__ import main
from shardformer.cli import sweep_command, train_command
from shardformer.config import FIELDS, Config, depth
from shardformer.config.depth import at_depth, choose_by_depth
from shardformer.errors import UsageError
from tests import runs


def sizes(config: Config) -> tuple[int, ...]:
    model, training = config.model, config.training
    return model.layers, model.d_model, model.heads, model.seq, training.batch, training.steps


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (1, (1, 32, 1, 64, 32, 48)),
        (4, (4, 128, 4, 128, 64, 768)),
        (12, (12, 384, 12, 512, 64, 5184)),
        (20, (20, 640, 20, 1024, 64, 12_000)),
    ],
)
def test_sizes_of_a_depth(layers, expected):
    assert sizes(at_depth(layers, {})) == expected


@pytest.mark.parametrize("layers", [1, 2, 3, 5, 7, 13, 32, 64, 256])
def test_every_depth_is_valid_and_reads_eight_tokens_a_parameter(layers):
    config = at_depth(layers, {}).replace(mesh="1x1")
    tokens = config.tokens_per_step * config.training.steps
    assert tokens == pytest.approx(8 * 12 * layers * (32 * layers) ** 2, rel=0.02)
    assert 0 < config.optimizer.warmup <= 0.02 * config.training.steps + 1
    assert config.model.head_size == 32


def test_rate_is_that_of_the_tuned_size():
    config = at_depth(12, {})
    assert (config.model.scale, config.optimizer.lr) == ("completep:128x4", 0.01)
    assert config.model.size_ratio == (3, 3)
    assert at_depth(12, {"optimizer": "adamw"}).optimizer.lr == 3e-3


def test_only_few_layers_are_unrolled():
    assert [at_depth(layers, {}).parallel.scan for layers in (6, 7)] == [False, None]


def test_given_keys_win_and_others_follow():
    assert sizes(at_depth(4, {"d_model": 256})) == (4, 256, 8, 256, 64, 1536)
    assert sizes(at_depth(4, {"batch": 32})) == (4, 128, 4, 128, 32, 1536)
    config = at_depth(4, {"steps": 500, "lr": 0.02, "warmup": 0, "scale": ""})
    assert (config.training.steps, config.optimizer.lr, config.optimizer.warmup) == (500, 0.02, 0)
    assert (config.model.scale, config.run.eval_every) == ("", 50)


def test_given_keys_that_are_ignored_are_noticed(broken):
    choose = depth.choose_by_depth
    broken(depth, "choose_by_depth", lambda layers, given: choose(layers, {}))
    with pytest.raises(AssertionError):
        test_given_keys_win_and_others_follow()


def test_table_has_the_values_of_the_run():
    given = {"seq": 64, "steps": 300}
    choices, config = choose_by_depth(6, given), at_depth(6, given)
    assert not {choice.key for choice in choices} & given.keys()
    assert all(config.get(choice.key) == choice.value and choice.reason for choice in choices)
    assert len({choice.key for choice in choices}) == len(choices)


def test_run_stores_chosen_keys_only():
    stored = json.loads(at_depth(4, {}).to_json())
    assert stored["d_model"] == 128
    assert stored.keys() <= FIELDS.keys()
    assert "depth" not in stored


def test_start_prints_choices_with_reasons(capsys):
    config = train_command._parse_new(["depth=4", "data=x.txt", "lr=0.02"])
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].split() == ["depth", "chooses", "because"]
    assert "steps=768  " in "\n".join(printed)
    assert not any(line.startswith("lr=") for line in printed)
    assert (config.optimizer.lr, config.data.source, config.run.out) == (0.02, "x.txt", "checkpoints/depth_4")


def test_preset_prints_no_choices(capsys):
    train_command._parse_new(["tiny"])
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["tiny", "depth=4"], "tiny and depth=N both choose the sizes; leave one of them out"),
        (["depth=0"], "depth must be at least 1"),
        (["depth=257"], "depth must be below 257"),
        (["depth=four"], "depth takes a whole number, got 'four'"),
        (["depth=4", "depth=5"], "depth is given twice"),
        (["depth=4", "optimizer=lbfgs"], r"depth=4 knows rates of normuon, muon, adamw, got optimizer=lbfgs; name a"),
        (["depth=4", "momentum=0.8", "optimizer=adamw"], "momentum does nothing without optimizer=muon"),
        (["depth=4", "seq=0"], "seq must be at least 1"),
        (["depth=4", "batch=0"], "batch must be at least 1"),
        (["depth=4", "layers=-1"], "layers must be at least 1"),
        (
            ["depth=4", "task=mine.py:Mine"],
            "depth=N stands in place of a preset; a run, a base and a task have their own sizes",
        ),
    ],
)
def test_wrong_depth_is_rejected(words, message):
    with pytest.raises(UsageError, match=message):
        train_command._parse_new(words)


def test_heads_divide_a_given_width():
    config = at_depth(4, {"d_model": 100})
    assert (config.model.heads, config.model.head_size) == (2, 50)


def test_reasons_are_those_of_the_values():
    reasons = {choice.key: choice.reason for choice in choose_by_depth(4, {"d_model": 100, "steps": 3, "seq": 48})}
    assert reasons["heads"].startswith("heads of 50")
    assert reasons["eval_every"] == "3 times in the run"
    assert reasons["batch"].startswith("6,144 tokens; 8,192 for depth=4, by")


@pytest.mark.parametrize("words", [["show", "RUN"], ["train", "--resume", "RUN"], ["train", "base=RUN"]], ids=" ".join)
def test_run_has_its_own_size(words, tmp_path, capsys):
    (tmp_path / "config.json").write_text(at_depth(1, {}).to_json())
    words = [word.replace("RUN", str(tmp_path)) for word in words]
    assert main([*words, "depth=4"]) == runs.USAGE
    assert "depth=N stands in place of a preset" in capsys.readouterr().err


@pytest.mark.parametrize("swept", ["optimizer=adamw,normuon", "layers=4,8", "batch=32,64"])
def test_sweep_of_a_leading_key_is_rejected(swept):
    """All runs would have the values that follow from the first one."""
    name = swept.partition("=")[0]
    with pytest.raises(UsageError, match=f"depth=N chooses other keys by {name}, which differs here"):
        sweep_command._parse(["depth=4", swept])
    assert sweep_command._parse(["depth=4", "lr=0.01,0.02"])[1] == {"lr": [0.01, 0.02]}


def test_plan_prints_choices(capsys):
    assert main(["plan", "depth=1", "chip=v5e:1x1", "compiler=none", "vocab=64"]) == 0
    assert capsys.readouterr().out.startswith("depth chooses")
