"""Tests of `bench race recipe=`: the recipes, their statistics, the recorded seeds, and a race of a few steps."""

import itertools
import json
import re
import statistics
from types import SimpleNamespace

import numpy as np
import pytest

from shardformer import data
from shardformer.bench import command_line, speedrun
from shardformer.config.presets import preset
from shardformer.data import builtin
from shardformer.errors import UsageError
from shardformer.layout import specs
from shardformer.model import Model
from tests import shared

README = speedrun.RECIPES.with_name("README.md").read_text()


@pytest.fixture
def small(monkeypatch):
    """A task that compiles quickly."""
    keys = {"layers": 1, "d_model": 16, "heads": 2, "seq": 16, "batch": 4, "mesh": "1x1"}
    monkeypatch.setattr(speedrun, "preset", lambda name: preset("tiny", **keys))
    monkeypatch.setattr(speedrun, "read_recipes", lambda: {"plain": {"steps": 3}})


@pytest.mark.parametrize("name", speedrun.read_recipes())
def test_recipe_is_an_accepted_configuration_of_the_task(name):
    settings = speedrun.make_settings(name, {"vocab": 65})
    task = preset(speedrun.TASK, vocab=65, mesh="1x1")
    shapes = [Model.abstract_parameters(c) for c in (settings, task)]
    recipe_parameters, task_parameters = map(specs.count_parameters, shapes)
    assert recipe_parameters < 1.01 * task_parameters


def test_other_size_cannot_race():
    with pytest.raises(UsageError, match="all recipes race with d_model=128, got d_model=256; leave it out"):
        speedrun.make_settings("adamw", {"d_model": 256})


@pytest.mark.parametrize("changes", [{"ema": 0.9}, {"experts": 4, "bias": "none"}, {"base": "checkpoints/x"}])
def test_another_task_cannot_race(changes):
    name = next(iter(changes))
    with pytest.raises(UsageError, match=f"all recipes race with {name}=.*, got {name}="):
        speedrun.make_settings("adamw", changes)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["recipe=adamwe"], "recipe takes one of adamw, .*, got 'adamwe'; did you mean 'adamw'"),
        (["recipe=adamw", "data=builtin"], "recipes race on tiny_shakespeare, got data=builtin with another text"),
        (["recipe=adamw", "peers=torch"], "race recipe=adamw reads json, recipe, seeds and keys of a run, got peers"),
        (["seeds=2"], "seeds=2 is read with recipe=NAME only; give one, or leave seeds out"),
    ],
)
def test_wrong_arguments_are_rejected(arguments, message):
    with pytest.raises(UsageError, match=message):
        command_line.main(["race", *arguments])


def test_p_value_is_that_of_a_one_sided_t_test():
    """scipy.stats.ttest_1samp(losses, 1.72, alternative="less").pvalue."""
    assert speedrun.find_p_value([1.71, 1.712, 1.718, 1.709]) == pytest.approx(0.01552152, rel=1e-5)
    assert speedrun.find_p_value([1.73, 1.728, 1.722, 1.731]) == pytest.approx(1 - 0.01552152, rel=1e-5)


def test_race_prints_a_row_of_each_seed(small, monkeypatch, capsys, tmp_path):
    beginning = builtin.text()[:20_000]  # is evaluated in a moment
    monkeypatch.setattr(builtin, "text", lambda: beginning)
    monkeypatch.setattr(speedrun, "TEXT", data.load_corpus(shared.tiny(data="builtin")).fingerprint)
    command_line.main(["race", "recipe=plain", "seeds=2", "seed=4", "data=builtin", f"json={tmp_path}/seeds.json"])
    rows, table = capsys.readouterr().out.splitlines()[:2], json.loads((tmp_path / "seeds.json").read_text())
    assert [speedrun.Seed.parse(row.split(",")).seed for row in rows] == [row["seed"] for row in table] == [4, 5]
    assert table[0]["loss"] != table[1]["loss"]
    for row in table:
        assert row["loss"] == pytest.approx((row["validation"] + row["test"]) / 2, rel=1e-3)
        assert row["cpu_seconds"] > 0


def test_seed_chooses_parameters_and_batches():
    """Without a compiled step: a trainer that records what it is given."""
    c, batches, starts = shared.tiny(steps=2), [], []
    corpus = SimpleNamespace(
        held_out=("validation", "test"),
        train_batches=lambda config: Stream({"seed": config.training.seed}),
    )
    trainer = SimpleNamespace(
        config=c,
        model=SimpleNamespace(init=lambda seed: seed),
        init=lambda: starts.append(c.training.seed),
        start=starts.append,
        step=lambda state, batch, at: (SimpleNamespace(params=None), batches.append(batch["seed"]) or np.zeros(1)),
    )
    losses = {split: SimpleNamespace(loss=1.0) for split in ("validation", "test", "validation + test")}
    evaluator = SimpleNamespace(trainer=trainer, corpus=corpus, evaluate_splits=lambda splits, params: losses)
    for seed in (3, 7):
        assert speedrun.train_seed("plain", seed, evaluator)[:5] == ("plain", seed, 2, 1.0, 1.0)
    assert starts == [3, 7]
    assert batches == [3, 3, 7, 7]


class Stream(itertools.repeat):
    """The same batch again and again."""

    def close(self):
        pass


def test_table_in_the_readme_is_that_of_the_recorded_seeds():
    for line in speedrun.format_recipes(speedrun.read_recorded()).splitlines()[1:]:
        recipe, _, tokens, seeds, loss, deviation, p_value, cpu_seconds = re.split(r"  +", line.strip())
        row = f"| `{recipe}`, {seeds} seeds | {tokens} | {loss} ({deviation}), p = {p_value} | {cpu_seconds} |"
        assert row in README, row


def test_recorded_seeds_are_of_recipes_in_the_file():
    recorded = speedrun.read_recorded()
    steps = {name: keys["steps"] for name, keys in speedrun.read_recipes().items()}
    assert [seed.steps for seed in recorded] == [steps[seed.recipe] for seed in recorded]
    seeds = [(seed.recipe, seed.seed) for seed in recorded]
    assert len({*seeds}) == len(seeds) > 1


def test_single_seed_has_no_p_value():
    [row] = speedrun.format_recipes([speedrun.Seed("a", 0, 10, 1.0, 1.0, 1.0, 2.0)]).splitlines()[1:]
    assert row.split() == ["a", "10", "7,680", "1", "1.0000", "-", "-", "2.0"]


def test_mean_of_a_recipe_is_in_its_row():
    seeds = [speedrun.Seed("a", number, 10, 1.0, 1.0, loss, 2.0) for number, loss in enumerate((1.5, 1.7))]
    [row] = speedrun.format_recipes(seeds).splitlines()[1:]
    assert row.split() == ["a", "10", "7,680", "2", f"{statistics.fmean((1.5, 1.7)):.4f}", "0.1414", "0.2", "2.0"]
