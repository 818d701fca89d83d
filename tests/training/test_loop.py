"""What a run does from its first step to its last, and that an interruption changes nothing but the time."""

import itertools
import json
import math
import os
import signal
import sys
from types import SimpleNamespace
from unittest import mock

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.cli import train_command
from shardformer.distributed import processes
from shardformer.errors import RunError
from shardformer.hardware import chips
from shardformer.logs import curves, metrics_file
from shardformer.logs.throughput import Throughput
from shardformer.model import flops
from shardformer.parallel import mesh
from shardformer.training import loop
from shardformer.training.accumulation import Scan
from shardformer.training.evaluation import Evaluation, Evaluator
from shardformer.training.run_folder import Run
from shardformer.training.step import Trainer
from shardformer.training.stop_signal import StopSignal
from tests import runs, shared

STEPS = 40
STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    """An uninterrupted run with dropout, logged, evaluated and saved at intervals that do not divide each other."""
    out = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(*uneven(text), f"out={out}", sample=True, curves=True) == 0
    return out


def uneven(text, steps: int = STEPS):
    return ("tiny", "mesh=4x2", f"data={text}", f"steps={steps}", "dropout=0.2", "log_every=3", "eval_every=7",
            "eval_batches=2", "save_every=9", "lr=1e-2")  # fmt: skip


def contents(out, step: int = STEPS) -> bytes:
    return (checkpoint.step_folder(out, step) / "arrays.npy").read_bytes()


def losses(out) -> dict[int, float]:
    return {int(row["step"]): float(row["loss"]) for row in runs.rows(out)}


def test_a_run_folder_holds_the_whole_story(whole):
    names = {path.name for path in whole.iterdir()}
    assert names >= {"config.json", "vocabulary.json", "metrics.csv", "tensorboard", "curves.png", "final.json"}
    assert not [name for name in names if name.startswith(".")]
    assert list((whole / "tensorboard").glob("events.out.tfevents.*"))
    assert checkpoint.read_config(whole).mesh == "4x2"
    newest = {path.name for path in checkpoint.newest_step_folder(whole).iterdir()}
    assert newest == {"arrays.npy", "tree.pkl", "manifest.json", "config.json", "vocabulary.json", "progress.json"}


def test_each_interval_is_kept(whole):
    rows = runs.rows(whole)
    evaluated = {*range(7, STEPS, 7), STEPS}
    assert {int(row["step"]) for row in rows} == {1, *range(3, STEPS, 3)} | evaluated
    assert {int(row["step"]) for row in rows if row["val_loss"]} == evaluated
    assert all(math.isfinite(float(row[key])) for row in rows for key in ("loss", "z_loss", "accuracy", "grad_norm"))
    assert losses(whole)[STEPS] < losses(whole)[1] - 0.5
    assert set(metrics_file.read_metrics(whole)["mfu"]) == {None}  # nobody knows the peak of a CPU


def test_the_newest_checkpoints_and_the_best_are_kept(whole):
    validated = {int(row["step"]): float(row["val_loss"]) for row in runs.rows(whole) if row["val_loss"]}
    best = min(validated, key=validated.get)
    progress = json.loads(checkpoint.read_document(checkpoint.newest_step_folder(whole), "progress.json"))
    assert progress == {"step": STEPS, "best": {"step": best, "val_loss": validated[best]}}
    assert best in checkpoint.list_steps(whole)
    assert len(set(checkpoint.list_steps(whole)) - {best}) <= 2
    assert json.loads((whole / "final.json").read_text())["step"] == best


def test_an_earlier_best_outlives_the_newest(tmp_path, text, monkeypatch):
    worse = itertools.count()
    validate = lambda *_: Evaluation(float(next(worse)), accuracy=0.5, tokens=100)
    monkeypatch.setattr(loop.TrainingLoop, "_validate", validate)
    assert runs.train(*uneven(text), f"out={tmp_path}/run") == 0
    assert checkpoint.list_steps(tmp_path / "run") == [7, 36, 40]
    assert json.loads((tmp_path / "run/final.json").read_text())["step"] == 7


def test_the_final_losses_are_those_of_eval(whole, capsys):
    assert main(["eval", str(whole), "mesh=4x2"]) == 0
    final = json.loads((whole / "final.json").read_text())
    printed = capsys.readouterr().out
    assert printed.startswith(f"step {final['step']}\n")
    for split in ("validation", "test", "validation + test"):
        assert f"{final[split]['loss']:.4f}" in printed
    assert final["validation + test"]["tokens"] == final["validation"]["tokens"] + final["test"]["tokens"] == 1998


@pytest.mark.parametrize("stops", [(13,), (1,), (7, 9, 39)])
def test_stopped_and_resumed_is_bitwise_the_same(tmp_path, text, whole, capsys, stops):
    out = tmp_path / "run"
    words = (*uneven(text), f"out={out}")
    for stop in stops:
        assert runs.train(*words, stop_after=stop) == 0
        said = capsys.readouterr().out
        assert f"SIGTERM: stopped after step {stop} of {STEPS}" in said
        assert f"resume with: python -m shardformer train --resume {out}" in said
        assert checkpoint.list_steps(out)[-1] == stop
        words = ("--resume", out)
    assert runs.train(*words) == 0
    assert contents(out) == contents(whole)
    assert runs.rows(out) == runs.rows(whole)
    assert (out / "final.json").read_text() == (whole / "final.json").read_text()


def test_what_was_done_after_the_last_checkpoint_is_done_again(tmp_path, text, whole, monkeypatch):
    """A crash leaves rows that are ahead of the newest checkpoint."""
    out = tmp_path / "run"
    reads, read = itertools.count(1), Trainer.read_metrics

    def unplugged(metrics):
        if next(reads) > 25:
            raise RuntimeError("the plug is pulled")
        return read(metrics)

    monkeypatch.setattr(Trainer, "read_metrics", staticmethod(unplugged))
    with pytest.raises(RuntimeError, match="plug"):
        runs.train(*uneven(text), f"out={out}")
    monkeypatch.undo()
    assert checkpoint.list_steps(out)[-1] < int(runs.rows(out)[-1]["step"])
    assert runs.train("--resume", out) == 0
    assert contents(out) == contents(whole)
    assert runs.rows(out) == runs.rows(whole)


def test_killed_before_any_checkpoint_begins_again(tmp_path, text, whole):
    out = tmp_path / "run"
    assert runs.train(*uneven(text), f"out={out}", stop_after=1) == 0
    for step in checkpoint.list_steps(out):
        for path in checkpoint.step_folder(out, step).iterdir():
            path.unlink()
        checkpoint.step_folder(out, step).rmdir()
    assert runs.train("--resume", out) == 0
    assert contents(out) == contents(whole)
    assert runs.rows(out) == runs.rows(whole)


@pytest.mark.parametrize("mesh", ["8x1", "1x8"])
def test_resumed_on_another_mesh(tmp_path, text, whole, mesh):
    out = tmp_path / "run"
    assert runs.train(*uneven(text), f"out={out}", stop_after=20) == 0
    assert runs.train("--resume", out, f"mesh={mesh}") == 0
    assert checkpoint.read_config(out).mesh == mesh
    got, expected = losses(out), losses(whole)
    assert got.keys() == expected.keys()
    assert {step for step in got if got[step] == expected[step]} >= {step for step in got if step <= 20}
    assert got[STEPS] == pytest.approx(expected[STEPS], rel=1e-4)


def test_a_preempted_run_continues_on_half_of_its_devices(tmp_path, text, whole, monkeypatch, capsys):
    out = tmp_path / "run"
    assert runs.train(*uneven(text), f"out={out}", stop_after=20) == 0
    monkeypatch.setattr(mesh, "find_devices", lambda: jax.devices()[:4])
    assert runs.train("--resume", out, "accum=auto") == 0
    said = capsys.readouterr().out
    assert "8 devices before, 4 now: mesh=4x2 becomes mesh=2x2, batch=8 stays\n" in said
    assert "auto took accum=2: 2 rows at a time on each device\n" in said
    assert "resuming from step 20 with mesh 4x2 -> 2x2, accum 1 -> 2\n" in said
    assert (checkpoint.read_config(out).mesh, checkpoint.read_config(out).accum) == ("2x2", 2)
    assert losses(out)[STEPS] == pytest.approx(losses(whole)[STEPS], rel=1e-4)


def test_more_steps(tmp_path, text, whole):
    out = tmp_path / "run"
    assert runs.train(*uneven(text, steps=20), f"decay_steps={STEPS}", f"out={out}") == 0
    assert runs.train("--resume", out, f"steps={STEPS}") == 0
    assert checkpoint.read_config(out).steps == STEPS
    assert contents(out) == contents(whole)


def test_records_that_cannot_be_opened_are_told_to_all_processes(tmp_path, text, monkeypatch, capsys):
    """A process that went on would wait for this one for ever."""
    out = tmp_path / "run"
    words = ("tiny", "mesh=4x2", f"data={text}")
    assert runs.train(*words, f"out={out}", "steps=2") == 0
    (out / "metrics.csv").write_text("damaged\n")
    told = []
    monkeypatch.setattr(processes, "gather_texts", lambda own: told.append(own) or [own])
    assert runs.train("--resume", out, "steps=4") == 1
    assert [words for words in told if "metrics.csv has unknown columns" in words]
    assert f"{out}/metrics.csv has unknown columns: got 'damaged'" in capsys.readouterr().err


def test_rows_that_one_process_alone_cannot_read_end_all(monkeypatch):
    """The others are in a step's collectives by then, where no message reaches them."""

    def damaged():
        raise RunError("record 7 is damaged")
        yield

    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    monkeypatch.setattr(processes.rendezvous, "end_process", lambda reason: sys.exit(reason))
    with pytest.raises(SystemExit, match=r"^process 0 of 2: record 7 is damaged; start all of them again"):
        loop.TrainingLoop._dispatch(mock.Mock(batches=damaged()), None, 1)
    batches = mock.MagicMock(**{"__len__.return_value": 1, "gather.return_value": damaged()})
    with pytest.raises(SystemExit, match=r"^process 0 of 2: record 7 is damaged; start all of them again"):
        Evaluator(mock.Mock(), mock.Mock(eval_batches=lambda *_: batches)).evaluate("test", None)
    with pytest.raises(RunError), processes.ending_all_on_failure():
        raise RunError("raised on all processes: each makes its own orderly end")


def test_gradients_are_kept_by_a_run_that_measures_them_alone(tmp_path, text, monkeypatch):
    opened = []
    monkeypatch.setattr(loop, "GradientsFile", lambda *given: opened.append(given))
    assert runs.train("tiny", "mesh=4x2", f"data={text}", f"out={tmp_path}/run", "steps=2") == 0
    assert opened == []


def test_a_finished_run_has_nothing_left(whole, capsys):
    before = contents(whole), runs.rows(whole)
    assert runs.train("--resume", whole) == 0
    assert f"the run is at step {STEPS} of {STEPS}" in capsys.readouterr().out
    assert (contents(whole), runs.rows(whole)) == before


def poisoned(step: int):
    """A trainer's step whose numbers are no numbers from `step` on, as when a gradient overflows."""

    def run(self, state, batch, batch_step):
        update = self._update
        losses, grads = update.model.loss_and_grad(state.params, batch, update.dropout_key(state.step))
        bad = jax.numpy.where(state.step + 1 >= step, jax.numpy.nan, 1.0)
        return update.apply(state, losses, jax.tree.map(lambda g: g * bad, grads), batch_step)

    return run


def test_not_a_number_ends_the_run_before_it_harms_the_state(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setattr(Scan, "run", poisoned(13))
    out = tmp_path / "run"
    assert main(["train", "tiny", "mesh=4x2", f"data={text}", f"out={out}"]) == 1
    error = capsys.readouterr().err
    assert "step 13: grad_norm is nan" in error
    assert "the last sound state is saved as step 12" in error
    assert checkpoint.list_steps(out) == [12]
    assert (out / "curves.png").exists()
    assert [int(row["step"]) for row in runs.rows(out)] == list(range(1, 13))
    arrays = restored(out)
    assert int(arrays.step) == 12
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(shared.on_host(arrays)))
    monkeypatch.undo()
    assert runs.train("tiny", "mesh=4x2", f"data={text}", f"out={tmp_path}/sound", stop_after=12) == 0
    assert contents(out, 12) == contents(tmp_path / "sound", 12)


def restored(out):
    run = Run.open(out)
    return run.restore(runs.trainer(run.config))[0]


def one_poisoned_step():
    settings = shared.tiny()
    trainer = Trainer(settings, mesh.make(settings))
    state, _ = trainer.step(trainer.init(), shared.batch(), 0)
    return int(state.step), [np.isfinite(leaf).all() for leaf in jax.tree.leaves(shared.on_host(state.params))]


def test_without_the_guard_the_state_is_harmed(monkeypatch):
    """The twin of the test above: what that one sees is the guard's work."""
    monkeypatch.setattr(Scan, "run", poisoned(1))
    step, sound = one_poisoned_step()
    assert step == 0
    assert all(sound)
    monkeypatch.setattr(jax.numpy, "isfinite", lambda x: jax.numpy.ones_like(x, bool))
    step, sound = one_poisoned_step()
    assert step == 1
    assert not any(sound)


def test_a_rate_that_explodes_names_step_and_quantity(tmp_path, text, capsys):
    assert runs.train("tiny", "mesh=4x2", f"data={text}", "lr=1e30", f"out={tmp_path}/run") == 1
    assert "step 1: update_norm is inf" in capsys.readouterr().err
    assert checkpoint.list_steps(tmp_path / "run") == []  # it was applied: its state is not worth keeping


def test_steps_in_flight_do_not_hang():
    """CPU collectives share a thread pool, and steps that nobody waits for would starve each other in it."""
    trainer = shared.trainer()
    state = trainer.init()
    for step in range(150):  # of 40 and more, some hung
        state, metrics = trainer.step(state, shared.batch(step % 4), step)
    assert int(state.step) == 150
    assert math.isfinite(trainer.read_metrics(metrics).loss)


def test_a_second_ctrl_c_ends_it_at_once_and_the_handlers_come_back(monkeypatch, capfd):
    class Left(BaseException):
        """Instead of the process's end."""

    def leave(status):
        raise Left(status)

    monkeypatch.setattr(os, "_exit", leave)
    before = [signal.getsignal(number) for number in STOPPING]
    with StopSignal() as stop:
        assert not stop.is_requested(1)
        signal.raise_signal(signal.SIGINT)
        assert stop.is_requested(2)
        assert stop.name == "SIGINT"
        assert "SIGINT: finishing the current steps, then saving" in capfd.readouterr().out
        with pytest.raises(Left, match="1"):
            signal.raise_signal(signal.SIGINT)
        assert "what came after the last checkpoint is lost" in capfd.readouterr().err
    assert [signal.getsignal(number) for number in STOPPING] == before


def closed_pipe():
    reader, writer = os.pipe()
    os.close(reader)
    return writer


@pytest.mark.parametrize("number", STOPPING)
@pytest.mark.parametrize("output", [closed_pipe, lambda: os.open("/dev/full", os.O_WRONLY), None])
def test_a_signal_stops_whatever_standard_output_is(number, output):
    kept = os.dup(1)
    try:
        with StopSignal() as stop:
            os.dup2(output(), 1) if output else os.close(1)
            signal.raise_signal(number)
            assert stop.is_requested(1)
            assert stop.name == number.name
    finally:
        os.dup2(kept, 1)
        os.close(kept)


TRACKERS = []


class Tracker:
    """What `tracker=tests.training.test_loop:Tracker` makes."""

    def __init__(self, settings):
        self.settings, self.rows = settings, []
        TRACKERS.append(self)

    def write(self, row):
        self.rows.append(row)
        raise OSError("no route to the tracker")

    def close(self):
        self.closed = True


def test_a_run_reports_to_a_tracker_and_traces_steps(tmp_path, text, capsys, monkeypatch):
    out = tmp_path / "run"
    for module in (loop, train_command):  # a chip whose peak is known
        monkeypatch.setattr(module, "find_chip", lambda _: chips.CHIPS["v5e"])
    words = ("tiny", "mesh=4x2", f"data={text}", "steps=4", f"out={out}", "profile=2:3")
    assert runs.train(*words, "tracker=tests.training.test_loop:Tracker") == 0
    (tracker,) = TRACKERS
    assert tracker.closed
    assert tracker.settings["steps"] == 4
    assert [row["step"] for row in tracker.rows] == [1, 2, 3, 4]
    assert all(row["peak_bytes"] > 10**8 for row in tracker.rows)  # of this process, as CPU devices do not tell
    full_speed = 8 * 197e12 / flops.flops_per_token(checkpoint.read_config(out))
    measured = [row for row in tracker.rows if row["tokens_per_s"]]
    assert measured
    assert [row["mfu"] for row in measured] == [row["tokens_per_s"] / full_speed for row in measured]
    assert metrics_file.read_metrics(out)["mfu"][-1] == measured[-1]["mfu"]
    said = capsys.readouterr().out
    assert "MFU 1 would be" in said
    assert said.count("Tracker failed: no route to the tracker; training continues") == 1
    assert f"profile: the trace up to step 3 is in {out}/profile" in said
    assert list(out.glob("profile/**/*.xplane.pb"))
    kept = (out / "config.json").read_text()
    assert "tracker" not in kept
    (out / "config.json").write_text(kept.replace("{", '{"tracker": "os:abort", "profile": "1:2",', 1))
    assert checkpoint.read_config(out).tracker == ""  # somebody else's run folder must not run code


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert not stop.is_requested(1)
    finally:
        signal.signal(signal.SIGHUP, before)


def test_nothing_for_looking_at_ends_a_run(tmp_path, text, monkeypatch, capsys):
    """A folder whose name is a broken formula to matplotlib and not UTF-8, a drawing and events that fail."""
    words = ("train", "tiny", "mesh=4x2", f"data={text}", "steps=2")
    out = tmp_path / b"$x_{$ caf\xe9".decode("utf-8", "surrogateescape")
    assert runs.train(*words[1:], f"out={out}", curves=True) == 0
    assert (out / "final.json").exists()
    assert (out / "curves.png").exists()
    assert list((out / "tensorboard").iterdir())
    capsys.readouterr()
    broken = mock.Mock(side_effect=ValueError("ParseException"))
    monkeypatch.setattr(curves, "draw_curves", broken)
    monkeypatch.setattr(loop, "TensorBoardEvents", broken)
    assert runs.train(*words[1:], f"out={tmp_path}/run", curves=True) == 0
    said = capsys.readouterr().out
    assert "TensorBoard did not start: ParseException; training continues\n" in said
    assert "curves.png was not drawn: ParseException\n" in said
    assert (tmp_path / "run/final.json").exists()


def test_fewer_steps_than_are_done_are_refused(whole, capsys):
    assert main(["train", "--resume", str(whole), "steps=7"]) == 2
    assert f"is at step {STEPS} already, got steps=7; give more" in capsys.readouterr().err


def test_of_slow_steps_only_one_is_in_flight(monkeypatch):
    assert loop._choose_steps_in_flight(0.01) == loop.IN_FLIGHT > 1
    assert loop._choose_steps_in_flight(10.0) == 1
    monkeypatch.setattr(jax, "process_count", lambda: 2)  # whose clocks differ: they keep to one number
    assert loop._choose_steps_in_flight(10.0) == loop.IN_FLIGHT


def test_steps_in_flight_count_as_training_beside_gradient_metrics():
    clock = [0.0]

    class State:  # its step takes 2 s more
        ready = False

        def block_until_ready(self):
            clock[0] += 0 if self.ready else 2
            self.ready = True
            return self

    def measure_gradients(state, _):
        state.block_until_ready()
        clock[0] += 5

    training = loop.TrainingLoop.__new__(loop.TrainingLoop)
    training.config = SimpleNamespace(grad_metrics=True, log_every=1)
    training.profiler, training.batches = SimpleNamespace(begin=lambda step: None), iter([{}])
    training.seconds_without_data, training.gradients = 0.0, None
    training.trainer = SimpleNamespace(gradient_metrics=measure_gradients, step=lambda *state: state)
    training.throughput = Throughput(100, 0, clock=lambda: clock[0])
    training.throughput.begin(1)
    training._dispatch(State(), 2)
    assert training.throughput.measure(2) == 50
