"""Signals during training: what is still computed, and what is saved."""

import csv
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer import checkpoint
from shardformer.cli import train_command
from shardformer.training import stop_signal, trainer
from shardformer.training.run_folder import Run
from shardformer.training.stop_signal import StopSignal
from shardformer.training.trainer import Trainer
from tests import launch, runs
from tests.launch import SECONDS
from tests.surroundings import before_call
from tests.training.uneven_run import STEPS, contents, uneven_words
from tests.waiting import PATIENCE, wait_for

# Step 5 keeps the main thread as XLA does, in a wait in C that no signal interrupts, until the file RELEASE exists. If
# it never does, the process ends. Steps this slow are not dispatched ahead.
LONG_STEP = (
    "-c",
    f"""{launch.WITHOUT_LUXURY}
import ctypes, itertools, os, threading, time
from shardformer.training import trainer
from shardformer.training.trainer import Trainer
trainer.VERY_SLOW_STEP = 0.0
libc, mutex, read = ctypes.CDLL(None), ctypes.create_string_buffer(64), Trainer.read_metrics
steps = itertools.count(1)

def release():
    end = time.monotonic() + {PATIENCE}
    while not os.path.exists(os.environ["RELEASE"]):
        if time.monotonic() > end:
            os._exit(3)
        time.sleep(0.02)
    libc.pthread_mutex_unlock(mutex)

def read_slowly(metrics):
    if next(steps) == 5:
        libc.pthread_mutex_lock(mutex)
        threading.Thread(target=release).start()
        print("step 5 is in flight", flush=True)
        libc.pthread_mutex_lock(mutex)
    return read(metrics)

Trainer.read_metrics = staticmethod(read_slowly)
sys.exit(main())
""",
)


def endless_words(text, out):
    return ("train", "tiny", "mesh=1x1", f"data={text}", f"out={out}", "steps=100000", "eval_every=100000",
            "log_every=1")  # fmt: skip


def wait_for_rows(process, out, rows: int) -> None:
    metrics = out / "metrics.csv"

    def are_written() -> bool:
        assert process.poll() is None
        return metrics.exists() and metrics.read_bytes().count(b"\n") > rows

    wait_for(are_written, SECONDS)


def last_logged_step(out) -> int:
    with open(out / "metrics.csv", newline="") as file:
        return int([*csv.DictReader(file)][-1]["step"])


@pytest.mark.multiprocess
def test_hangup_after_a_closed_pipe_saves_the_run(tmp_path, text):
    out = tmp_path / "run"
    command = [sys.executable, "-m", "shardformer", *endless_words(text, out)]
    pipe = subprocess.PIPE
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, cwd=root, env=environment)
    try:
        assert process.stdout.readline()
        process.stdout.close()
        wait_for_rows(process, out, 5)
        process.send_signal(signal.SIGHUP)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    assert checkpoint.list_steps(out)[-1] == last_logged_step(out)
    assert not (out / ".lock").exists()


def start_long_step(text, folder):
    """Starts a run, and returns it while it waits for step 5."""
    environment = {"RELEASE": str(folder / "release")}
    process = launch.start(*endless_words(text, folder / "run"), environment=environment, program=LONG_STEP)
    read_until(process, "step 5 is in flight")
    return process


def read_until(process, words: str) -> None:
    """Reads what a process prints until a line has these words."""
    assert any(words in line for line in process.stdout), f"the process did not print {words}"


@pytest.mark.multiprocess
def test_long_step_is_finished_and_saved_after_ctrl_c(tmp_path, text):
    process = start_long_step(text, tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: finishing the step in flight, then saving; Ctrl-C now ends")
        (tmp_path / "release").touch()
        read_until(process, "SIGINT: stopped after step 5 of 100000")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    assert checkpoint.list_steps(tmp_path / "run") == [5]
    assert last_logged_step(tmp_path / "run") == 5


@pytest.mark.multiprocess
def test_second_ctrl_c_ends_a_long_step_at_once(tmp_path, text):
    process = start_long_step(text, tmp_path)
    try:
        process.send_signal(signal.SIGINT)
        read_until(process, "SIGINT: finishing")
        process.send_signal(signal.SIGINT)
        assert process.wait(SECONDS) == 1
        assert "shardformer: ended at once; what came after the last checkpoint is lost" in process.stderr.read()
    finally:
        process.kill()
    assert checkpoint.list_steps(tmp_path / "run") == []


@pytest.mark.slow
def test_no_step_is_dispatched_after_a_signal(tmp_path, text, monkeypatch, capsys):
    """Steps this slow are not dispatched ahead: the signal comes while step 5 is in flight."""
    monkeypatch.setattr(trainer, "VERY_SLOW_STEP", 0.0)
    reads = []

    def interrupt(_):
        reads.append(1)
        if len(reads) == 5:
            runs.terminate()

    before_call(monkeypatch, Trainer, "read_metrics", interrupt)
    assert runs.train(*uneven_words(text), f"out={tmp_path}/run") == 0
    assert f"SIGTERM: stopped after step 5 of {STEPS}" in capsys.readouterr().out
    assert len(reads) == 5
    assert checkpoint.list_steps(tmp_path / "run") == [5]


def terminate_at_evaluated_batch(monkeypatch, number: int) -> list[int]:
    """Sends SIGTERM during a batch of an evaluation; returns the list of the batches that are evaluated."""
    evaluated = []

    def interrupt(*_):
        evaluated.append(len(evaluated) + 1)
        if len(evaluated) == number:
            runs.terminate()

    before_call(monkeypatch, Trainer, "sums", interrupt)
    return evaluated


# Evaluations of two batches each, after the steps 7, 14, ..., 35 and 40.
@pytest.mark.slow
@pytest.mark.parametrize(("batch", "stopped_at"), [(1, 7), (5, 21), (11, STEPS)])
def test_stop_during_an_evaluation_saves_first(tmp_path, text, monkeypatch, capsys, finished_run, batch, stopped_at):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        evaluated = terminate_at_evaluated_batch(patch, batch)
        assert runs.train(*uneven_words(text), f"out={out}") == 0
    printed = capsys.readouterr().out
    assert len(evaluated) == batch
    assert f"SIGTERM: stopped after step {stopped_at} of {STEPS}" in printed
    assert f"resume with: python -m shardformer train --resume {out}" in printed
    assert checkpoint.list_steps(out)[-1] == stopped_at
    assert stopped_at not in [int(row["step"]) for row in runs.rows(out)]
    assert runs.train("--resume", out) == 0
    assert contents(out) == contents(finished_run)
    assert runs.rows(out) == runs.rows(finished_run)
    assert (out / "final.json").read_text() == (finished_run / "final.json").read_text()


@pytest.mark.slow
def test_evaluation_is_repeated_until_it_ends(tmp_path, text, monkeypatch, finished_run):
    out = tmp_path / "run"
    words = (*uneven_words(text), f"out={out}")
    for _ in range(2):
        with monkeypatch.context() as patch:
            terminate_at_evaluated_batch(patch, 1)
            assert runs.train(*words) == 0
        assert checkpoint.list_steps(out) == [7]
        words = ("--resume", out)
    assert runs.train("--resume", out) == 0
    assert runs.rows(out) == runs.rows(finished_run)
    assert contents(out) == contents(finished_run)


@pytest.mark.slow
def test_best_of_an_interrupted_last_evaluation_is_found(tmp_path, text, monkeypatch, finished_run):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        terminate_at_evaluated_batch(patch, 11)
        assert runs.train(*uneven_words(text), f"out={out}") == 0
    assert runs.train("--resume", out) == 0
    run, whole = (Run.open(folder) for folder in (out, finished_run))
    assert run.choose_step() == whole.choose_step() == json.loads((out / "final.json").read_text())["step"]


@pytest.mark.slow
def test_stop_during_the_final_evaluation_ends_it(tmp_path, text, monkeypatch, capfd, finished_run):
    out = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(stop_signal, "ANNOUNCE_SECONDS", PATIENCE)  # its line comes first, whenever its thread runs
        evaluated = terminate_at_evaluated_batch(patch, 13)
        assert runs.train(*uneven_words(text), f"out={out}") == 0
        assert len(evaluated) == 13
    printed = capfd.readouterr().out
    assert "SIGTERM: ending the final evaluation; the run is saved; Ctrl-C now ends at once\n" in printed
    resume, last = printed.splitlines()[-2:]
    assert resume == f"resume with: python -m shardformer train --resume {out}"
    assert last.startswith("goodput ")
    assert not (out / "final.json").exists()
    assert runs.train("--resume", out) == 0
    assert (out / "final.json").read_text() == (finished_run / "final.json").read_text()


@pytest.mark.slow
def test_stop_during_the_sample_ends_it(tmp_path, text, monkeypatch, capfd, finished_run):
    """Everything is written by then, so there is nothing to resume."""
    drawn, watched = [], train_command.sample_text

    def interrupted(run, generator, params, sampling, watch):
        def watch_and_terminate(row, ids):
            drawn.append(ids)
            runs.terminate()
            watch(row, ids)

        return watched(run, generator, params, sampling, watch_and_terminate)

    monkeypatch.setattr(train_command, "sample_text", interrupted)
    out = tmp_path / "run"
    assert runs.train(*uneven_words(text), f"out={out}", sample=True) == 0
    assert len(drawn) == 1
    printed = capfd.readouterr().out
    assert "validation + test" in printed
    assert "it writes:" not in printed
    assert "resume with" not in printed
    assert (out / "final.json").read_text() == (finished_run / "final.json").read_text()


@pytest.mark.slow
def test_stop_before_the_first_step_saves_nothing(tmp_path, text, capsys):
    """There is nothing to lose yet: resume starts again from the seed."""
    with StopSignal() as outer:  # a command before this one
        assert not outer.is_requested()
    out = tmp_path / "run"
    start = StopSignal.__enter__

    def enter(self):
        found = start(self)
        runs.terminate()
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StopSignal, "__enter__", enter)
        assert runs.train(*uneven_words(text), f"out={out}") == 0
    assert f"SIGTERM: stopped after step 0 of {STEPS}" in capsys.readouterr().out
    assert checkpoint.list_steps(out) == []
