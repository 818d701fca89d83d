"""Sweeps: which runs are trained next follows from the losses in their folders."""

import math
import signal
from pathlib import Path

import pytest

from shardformer import UsageError, preset
from shardformer.__main__ import main
from shardformer.checkpoint import FolderTaken
from shardformer.errors import RunError
from shardformer.sweep import Sweep, _check_unchanged
from shardformer.training.stop_signal import StopSignal
from tests import runs


@pytest.fixture
def sweep(tmp_path):
    """Returns four rates with two seeds, compared after steps 10, 20 and 40."""
    config = preset("tiny", out=str(tmp_path), steps=40, eval_every=5)
    return Sweep.of(config, {"lr": [1e-4, 1e-3, 1e-2, 1e-1]}, seeds=2, halvings=2)


def write(config, losses: dict[int, float]) -> None:
    """Adds validation losses of a run, by step."""
    folder = Path(config.run.out)
    folder.mkdir(exist_ok=True)
    rows = (folder / "metrics.csv").read_text() if (folder / "metrics.csv").exists() else "step,val_loss\n"
    (folder / "metrics.csv").write_text(rows + "".join(f"{step},{loss}\n" for step, loss in losses.items()))


def reach(sweep: Sweep, step: int, losses: dict[float, list[float]]) -> None:
    """Adds the losses of each rate's seeds at a step, and worse ones before."""
    for setting in sweep.settings:
        for config, loss in zip(setting.runs, losses.get(setting.values["lr"], ()), strict=False):
            write(config, {step - 5: loss + 1, step: loss})


def rates(pending) -> list[tuple[float, int]]:
    return [(config.optimizer.lr, config.training.seed) for config in pending]


FIRST = {1e-4: [3.0, 3.1], 1e-3: [2.0, 2.9], 1e-2: [2.4, 2.2], 1e-1: [2.1, 3.8]}


def test_all_runs_are_compared_after_a_quarter_of_the_steps(sweep):
    halving, pending = sweep.find_pending()
    assert (halving, len(pending)) == (2, 8)
    assert [sweep.end(pending[0], halving) for halving in (2, 1, 0)] == [10, 20, 40]
    reach(sweep, 10, FIRST | {1e-1: [2.1]})
    assert rates(sweep.find_pending()[1]) == [(1e-1, 1)]


def test_steps_that_only_data_count_are_rejected():
    with pytest.raises(UsageError, match="a sweep compares runs by steps, got epochs=3; give steps="):
        Sweep.of(preset("tiny", epochs=3.0), {"lr": [1e-3, 1e-2]}, seeds=1, halvings=0)


def test_a_comparison_is_at_an_evaluation():
    sweep = Sweep.of(preset("tiny", steps=40, eval_every=8), {"lr": [1e-3, 1e-2]}, seeds=1, halvings=1)
    assert sweep.end(sweep.settings[0].runs[0], 1) == 16


def test_the_better_half_by_the_mean_of_the_seeds_goes_on(sweep):
    reach(sweep, 10, FIRST)
    assert sweep.find_pending()[0] == 1
    assert {rate for rate, _ in rates(sweep.find_pending()[1])} == {1e-2, 1e-3}  # the best seeds are 1e-3's and 1e-1's


def test_a_comparison_counts_no_later_loss(sweep):
    reach(sweep, 10, FIRST)
    write(sweep.settings[0].runs[0], {10: 3.0, 20: 0.1})
    assert {rate for rate, _ in rates(sweep.find_pending()[1])} == {1e-2, 1e-3}


def test_of_three_combinations_two_go_on(tmp_path):
    sweep = Sweep.of(preset("tiny", out=str(tmp_path), eval_every=10), {"lr": [1e-4, 1e-3, 1e-2]}, 1, 1)
    for setting, loss in zip(sweep.settings, (3.0, 2.0, 1.0), strict=True):
        write(setting.runs[0], {20: loss})
    assert rates(sweep.find_pending()[1]) == [(1e-2, 0), (1e-3, 0)]  # the best first


def test_failed_runs_count_as_the_worst(sweep):
    reach(sweep, 10, FIRST)
    failed = sweep.settings[2].runs[0]
    sweep.failed[failed.run.out] = "the loss is not finite"
    (Path(failed.run.out) / "metrics.csv").unlink()
    assert {rate for rate, _ in rates(sweep.find_pending()[1])} == {1e-3, 1e-1}
    assert sweep.results()[-1].loss == math.inf
    write(failed, {10: 1.0})  # by another process
    assert {rate for rate, _ in rates(sweep.find_pending()[1])} == {1e-2, 1e-3}


def test_failed_combination_is_the_last_result(sweep):
    reach(sweep, 10, FIRST)
    for run in sweep.settings[1].runs:
        sweep.failed[run.run.out] = "the loss is not finite"
        (Path(run.run.out) / "metrics.csv").unlink()
    assert sweep.results()[-1].setting is sweep.settings[1]


def test_signal_during_the_stop_of_a_comparison_ends_the_sweep():
    stop = StopSignal()
    stop.request("halving")
    assert stop.name == "halving"
    stop._note(signal.SIGTERM, None)
    stop.request("halving")
    assert stop.name == "SIGTERM"


def test_results_rank_the_ones_that_came_further_first(sweep):
    reach(sweep, 10, FIRST)
    reach(sweep, 20, {1e-3: [1.9, 1.9], 1e-2: [2.3, 2.1]})
    reach(sweep, 40, {1e-3: [1.7, 1.8]})
    assert sweep.find_pending() == (0, [])
    assert [(r.setting.values["lr"], r.step) for r in sweep.results()] == [
        (1e-3, 40),
        (1e-2, 20),
        (1e-1, 10),
        (1e-4, 10),
    ]
    assert sweep.results()[0].loss == pytest.approx(1.75)
    assert sweep.results()[0].deviation == pytest.approx(0.05 * math.sqrt(2))


def test_runs_of_other_processes_are_waited_for(sweep, monkeypatch):
    """A run that is in use is left out, and looked for again when there is nothing else to do."""
    trained, busy = [], [sweep.settings[0].runs[0]]

    def train_one(self, config, halving, left):
        if config in busy:
            raise FolderTaken("in use")
        trained.append((config.optimizer.lr, config.training.seed, halving))
        write(config, {sweep.end(config, halving): FIRST[config.optimizer.lr][config.training.seed]})
        return True

    def end_of_other_process(_):
        write(busy.pop(), {10: FIRST[1e-4][0]})

    monkeypatch.setattr(Sweep, "train_one", train_one)
    monkeypatch.setattr("shardformer.sweep.time.sleep", end_of_other_process)
    assert sweep.train()
    assert len(trained) == 7 + 4 + 2
    assert trained[0] == (1e-4, 1, 2)
    assert trained[-1] == (1e-2, 1, 0)


def test_a_failed_run_leaves_the_others(sweep, monkeypatch):
    def train_one(self, config, halving, left):
        if config.optimizer.lr == 1e-1:
            raise RunError("the loss is not finite")
        write(config, {sweep.end(config, halving): config.optimizer.lr})
        return True

    monkeypatch.setattr(Sweep, "train_one", train_one)
    assert sweep.train()
    assert len(sweep.failed) == 2
    assert sweep.results()[0].setting.values["lr"] == 1e-4


def test_a_stop_ends_the_sweep(sweep, monkeypatch):
    monkeypatch.setattr(Sweep, "train_one", lambda *_: False)
    assert not sweep.train()


@pytest.mark.parametrize("changed", [{"order": "random"}, {"validation": "0.5"}, {"batch": 16}])
def test_runs_of_other_keys_are_not_continued(changed, sweep):
    """Their losses would not be comparable. What a run settles by its data is no other key."""
    run = sweep.settings[0].runs[0]
    Path(run.run.out).mkdir()
    (Path(run.run.out) / "config.json").write_text(run.replace(vocab=63, tokenizer="chars", **changed).to_json())
    with pytest.raises(UsageError, match=f"was trained with other keys .*{next(iter(changed))}"):
        sweep.train()
    (Path(run.run.out) / "config.json").write_text(run.replace(vocab=63, tokenizer="chars", mesh="2x1").to_json())
    _check_unchanged(run)


def test_evaluations_too_rare_are_rejected():
    config = preset("tiny", steps=40, eval_every=20)
    assert Sweep.of(config, {"lr": [1e-3]}, 1, 1)
    with pytest.raises(UsageError, match=r"compares runs after 1/4 of steps=40, but eval_every=20; .* at most 10"):
        Sweep.of(config, {"lr": [1e-3]}, 1, 2)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("lr=1e-3", "a sweep compares runs: give a key several values"),
        ("seed=1,2", "give seeds=N in place"),
        ("lr=1e-3,0.001", "lr=1e-3,0.001 has a value twice"),
        ("lr=1e-3,fast", "lr takes a number, got 'fast'"),
        ("steps=20,40 eval_every=20 halvings=1 lr=1,2", "compares runs after 1/2 of steps=20"),
        ("activation=gelu,gleu", "activation is one of"),
    ],
)
def test_wrong_words_are_named(words, message, capsys, tmp_path):
    assert main(["sweep", "tiny", f"out={tmp_path}", *words.split()]) == runs.USAGE
    assert message in capsys.readouterr().err


@pytest.mark.nightly
def test_the_command_trains_ranks_draws_and_continues(tmp_path, capsys):
    def sweep(*words) -> int:
        return main(["sweep", "tiny", f"data={runs.text(tmp_path)}", "mesh=2x1", "lr=1e-4,1e-2", "steps=8",
                     "eval_every=4", "log_every=4", "halvings=1", f"out={tmp_path / 'sweep'}", *words])  # fmt: skip

    assert sweep() == 0
    out = capsys.readouterr().out
    assert out.count("halving: stopped after step") == 2
    table = out.partition("\ncombination")[2].splitlines()
    assert [line.split()[:2] for line in table[1:3]] == [["lr=0.01", "8"], ["lr=0.0001", "4"]]
    assert (tmp_path / "sweep/sweep.png").exists()
    assert runs.rows(tmp_path / "sweep/lr-0.01_seed-0")[-1]["step"] == "8"
    assert sweep() == 0
    assert "resuming" not in capsys.readouterr().out  # nothing is left
    assert sweep("clip=2", "seeds=2") == runs.USAGE
    assert "was trained with other keys (clip 1.0 -> 2.0)" in capsys.readouterr().err
    assert sweep("order=random", "seeds=2") == runs.USAGE
    assert "was trained with other keys (order epoch -> random)" in capsys.readouterr().err
