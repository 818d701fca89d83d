"""The steps of a run: the rows, checkpoints and errors that they lead to."""

import itertools
import json
import math
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.devices import processes
from shardformer.errors import RunError
from shardformer.logs import metrics_file
from shardformer.logs.throughput import Throughput
from shardformer.training import loop
from shardformer.training.evaluation import Evaluation, Evaluator
from shardformer.training.run_folder import Run
from shardformer.training.step import Measured
from shardformer.training.step_statistics import StepStatistics
from shardformer.training.stop_signal import StopSignal
from shardformer.training.trainer import IN_FLIGHT, choose_steps_ahead
from tests import runs, shared
from tests.integration import made_up
from tests.surroundings import answer_for_processes, simulate_failing_processes, simulate_processes
from tests.training.bad_batches import NAN, bad_batches
from tests.training.uneven_run import STEPS, contents, losses, plain_words, uneven_words


def test_run_folder_holds_every_file(finished_run):
    names = {path.name for path in finished_run.iterdir()}
    assert names >= {"config.json", "vocabulary.json", "metrics.csv", "tensorboard", "curves.png", "final.json"}
    assert not [name for name in names if name.startswith(".")]
    assert list((finished_run / "tensorboard").glob("events.out.tfevents.*"))
    assert checkpoint.read_config(finished_run).parallel.mesh == "4x2"
    newest = {path.name for path in checkpoint.newest_step_folder(finished_run).iterdir()}
    assert newest == {"arrays.npy", "tree.pkl", "manifest.json", "config.json", "vocabulary.json", "progress.json"}


def test_rows_follow_each_interval(finished_run):
    rows = runs.rows(finished_run)
    evaluated = {*range(7, STEPS, 7), STEPS}
    assert {int(row["step"]) for row in rows} == {1, *range(3, STEPS, 3)} | evaluated
    assert {int(row["step"]) for row in rows if row["val_loss"]} == evaluated
    assert all(math.isfinite(float(row[key])) for row in rows for key in ("loss", "z_loss", "accuracy", "grad_norm"))
    assert losses(finished_run)[STEPS] < losses(finished_run)[1] - 0.5
    assert set(metrics_file.read_metrics(finished_run)["mfu"]) == {None}  # nobody knows the peak of a CPU


def test_newest_and_best_checkpoints_are_kept(finished_run):
    validated = {int(row["step"]): float(row["val_loss"]) for row in runs.rows(finished_run) if row["val_loss"]}
    best = min(validated, key=validated.get)
    progress = json.loads(checkpoint.read_document(checkpoint.newest_step_folder(finished_run), "progress.json"))
    assert progress == {"step": STEPS, "best": {"step": best, "val_loss": validated[best]}}
    assert best in checkpoint.list_steps(finished_run)
    assert len(set(checkpoint.list_steps(finished_run)) - {best}) <= 2
    assert json.loads((finished_run / "final.json").read_text())["step"] == best


@pytest.mark.slow
def test_earlier_best_outlives_the_newest(tmp_path, text, monkeypatch):
    worse = itertools.count()
    monkeypatch.setattr(loop.TrainingLoop, "_validate", lambda *_: Evaluation(float(next(worse)), 0.5, tokens=100))
    assert runs.train(*uneven_words(text), f"out={tmp_path}/run") == 0
    assert checkpoint.list_steps(tmp_path / "run") == [7, 36, 40]
    assert json.loads((tmp_path / "run/final.json").read_text())["step"] == 7


def test_final_losses_equal_those_of_eval(finished_run, capsys):
    assert main(["eval", str(finished_run), "mesh=4x2"]) == 0
    final = json.loads((finished_run / "final.json").read_text())
    printed = capsys.readouterr().out
    assert printed.startswith(f"step {final['step']}\n")
    for split in ("validation", "test", "validation + test"):
        assert f"{final[split]['loss']:.4f}" in printed
    assert final["validation + test"]["tokens"] == final["validation"]["tokens"] + final["test"]["tokens"] == 1998


def test_unreadable_rows_of_one_process_end_all(monkeypatch):
    """The other processes are in a step's collectives, where no message reaches them."""

    def damaged():
        raise RunError("record 7 is damaged")
        yield

    simulate_failing_processes(monkeypatch, sys.exit)
    with pytest.raises(SystemExit, match=r"^process 0 of 2: record 7 is damaged; start all of them again"):
        loop.TrainingLoop._dispatch(mock.Mock(batches=damaged()), None, 1)
    batches = mock.MagicMock(**{"__len__.return_value": 1, "gather.return_value": damaged()})
    with pytest.raises(SystemExit, match=r"^process 0 of 2: record 7 is damaged; start all of them again"):
        Evaluator(mock.Mock(), mock.Mock(eval_batches=lambda *_: batches)).evaluate("test", None)
    with pytest.raises(RunError), processes.ending_all_on_failure():
        raise RunError("raised on all processes: each makes its own orderly end")


@pytest.mark.slow
def test_non_finite_step_ends_the_run_with_the_state_before_it(tmp_path, text, capsys):
    out, words = tmp_path / "run", plain_words(text)
    with bad_batches({13: NAN}):
        assert runs.train(*words, f"out={out}", curves=True) == 1
    error = capsys.readouterr().err
    assert "step 13: loss is nan" in error
    assert "the last finite state is saved as step 12" in error
    assert checkpoint.list_steps(out) == [12]
    assert (out / "curves.png").exists()
    assert [int(row["step"]) for row in runs.rows(out)] == list(range(1, 13))
    arrays = restored(out)
    assert int(arrays.step) == 12
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(shared.on_host(arrays)))
    with bad_batches({}):
        assert runs.train(*words, f"out={tmp_path}/sound", stop_after=12) == 0
    assert contents(out, 12) == contents(tmp_path / "sound", 12)


def restored(out):
    run = Run.open(out)
    return run.restore(runs.trainer(run.config))[0]


@pytest.mark.slow
def test_without_the_guard_a_non_finite_step_harms_the_state():
    """The negative twin: without the guard, the test above would fail."""
    update, state = shared.trainer().update, shared.initial_state()
    grads = made_up.like(state.params, jax.numpy.nan)
    guarded, _ = made_up.apply()(state, made_up.FINE, grads, np.int32(0))
    measured = Measured(*made_up.FINE, jax.numpy.float32(jax.numpy.nan))
    harmed, _, _ = jax.jit(update.advance)(state, grads, measured)
    assert (int(guarded.step), int(harmed.step)) == (0, 1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(shared.on_host(guarded)))
    moments = [leaf for leaf in jax.tree.leaves(shared.on_host(harmed.optimizer)) if leaf.ndim]
    assert moments
    assert not any(np.isfinite(leaf).any() for leaf in moments)


@pytest.mark.slow
def test_infinite_update_is_named_with_its_step(tmp_path, text, capsys):
    assert runs.train("tiny", "mesh=4x2", f"data={text}", "lr=1e30", f"out={tmp_path}/run") == 1
    assert "step 1: update_norm is inf" in capsys.readouterr().err
    assert checkpoint.list_steps(tmp_path / "run") == []  # it was applied: its state is not worth keeping


@pytest.mark.slow
def test_steps_without_waiting_do_not_hang():
    """CPU collectives share a thread pool, in which too many steps in flight starve each other."""
    trainer = shared.trainer()
    state = trainer.init()
    for step in range(150):  # of 40 and more, some hung
        state, metrics = trainer.step(state, shared.batch(step % 4), step)
    assert int(state.step) == 150
    assert math.isfinite(trainer.read_metrics(metrics).loss)


def test_slow_steps_are_not_dispatched_ahead():
    assert choose_steps_ahead(0.01) == IN_FLIGHT > 1
    assert choose_steps_ahead(1.0) == 1
    assert choose_steps_ahead(10.0) == 0


def test_processes_agree_once_on_the_steps_ahead(monkeypatch):
    """Their clocks differ: here the first process finds the steps slow, and this one does not."""
    simulate_processes(monkeypatch, 2)
    answer_for_processes(monkeypatch, lambda text: ["0", text])
    pacing, chosen = loop.Pacing(), []
    for _ in range(4):
        pacing.count_read()
        chosen.append(pacing.steps_ahead)
    assert chosen == [1, 0, 0, 0]


def test_steps_in_flight_count_as_training_time():
    clock = [0.0]

    class State:  # its step takes 2 s more
        ready = False

        def block_until_ready(self):
            clock[0] += 0 if self.ready else 2
            self.ready = True
            return self

    class Statistics(StepStatistics):  # a measurement of 5 s
        _file = None

        def read(self, state, batch):
            state.block_until_ready()
            clock[0] += 5

    trainer = mock.Mock(config=SimpleNamespace(run=SimpleNamespace(log_every=1)))
    throughput = Throughput(100, 0, clock=lambda: clock[0])
    throughput.begin(1)
    evaluator, outputs, statistics = (
        mock.Mock(trainer=trainer),
        mock.Mock(throughput=throughput),
        Statistics(shared.tiny()),
    )
    statistics._trainer = trainer
    training = loop.TrainingLoop(evaluator, iter([{}]), outputs, StopSignal(), 0, (statistics,))
    training._dispatch(State(), 2)
    assert throughput.measure(2) == 50
