"""Real processes: a kill, signals, exit statuses."""

import contextlib
import importlib.util
import signal
import sys
import threading
from pathlib import Path

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.config import Config
from shardformer.devices import processes, rendezvous
from shardformer.errors import RunError
from tests import runs
from tests.launch import ROOT, SECONDS, Forked, connect_pair, finished, start
from tests.surroundings import simulate_processes
from tests.waiting import PATIENCE, wait_for

DRAWS_BY_XLA = True  # as other processes do, with whose runs those of this one are compared bitwise: conftest.py
STEPS = 100_000  # more than a run takes before it is signalled, however late that is
WORDS = ("tiny", "layers=1", "mesh=2x2", "decay_steps=100", "dropout=0.1", "log_every=1", "eval_every=45",
         "eval_batches=1", "save_every=20")  # fmt: skip


def signalled(number: signal.Signals, more: int, out: Path, process) -> tuple[int, str, str]:
    """Signals a run that has written `more` rows than it had."""

    def count() -> int:
        return (out / "metrics.csv").read_bytes().count(b"\n") if (out / "metrics.csv").exists() else 0

    wanted = count() + more
    wait_for(lambda: process.poll() is not None or count() > wanted, SECONDS)
    process.send_signal(number)
    return finished(process)


@pytest.mark.multiprocess
def test_a_kill_and_two_signals_cost_nothing_but_time(tmp_path, text):
    """The kill comes at about step 35, between two checkpoints; scripts/kill_test.py kills at any moment."""
    out, whole = tmp_path / "run", tmp_path / "whole"
    killed = Forked("train", *WORDS, f"steps={STEPS}", f"data={text}", f"out={out}")
    assert signalled(signal.SIGKILL, 35, out, killed)[0] == -signal.SIGKILL
    for number, begin in ((signal.SIGTERM, Forked), (signal.SIGINT, start)):
        status, said, error = signalled(number, 15, out, begin("train", "--resume", out))
        assert (status, error) == (0, "")
        assert f"{number.name}: stopped after step {checkpoint.list_steps(out)[-1]} of {STEPS}" in said
        assert "resume with: python -m shardformer train --resume" in said
    last = checkpoint.list_steps(out)[-1] + 20
    assert runs.train("--resume", out, f"steps={last}") == 0
    assert runs.train(*WORDS, f"steps={last}", f"data={text}", f"out={whole}") == 0
    states = [(checkpoint.step_folder(folder, last) / "arrays.npy").read_bytes() for folder in (out, whole)]
    assert states[0] == states[1]
    assert runs.rows(out) == runs.rows(whole)


@pytest.mark.multiprocess
def test_a_wrong_command_ends_with_its_status_and_one_line():
    running = [start(), start("train", "tiny", "mesh=3x1", "out=/dev/null/run")]
    for process, message in zip(running, ["", "batch=8 does not divide over dp=3"], strict=True):
        status, said, error = finished(process)
        assert status == 2
        assert message in error
        assert len(error.splitlines()) == bool(message)
        assert bool(said) != bool(message)  # no command at all: how to use it


@pytest.fixture
def kill_test():
    """The script; its runs are copies of a process that has imported JAX."""
    spec = importlib.util.spec_from_file_location("kill_test", ROOT / "scripts" / "kill_test.py")
    script = importlib.util.module_from_spec(spec)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "kill_test", script)
        spec.loader.exec_module(script)
        yield script


@pytest.mark.nightly
def test_the_kill_test_runs(kill_test, monkeypatch, capsys):
    """One kill here, so that the script stays right."""
    monkeypatch.setattr(kill_test, "start", lambda folder, *words: Forked(*words))
    assert kill_test.main(["kills=1", "steps=3"]) == 0
    assert " 0 failures" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("word", "message"),
    [("5", "expected key=value, got '5'"), ("kils=5", "did you mean 'kills'"), ("out=/not/there", "is not a folder"),
     ("steps=2", "steps at least 3")],
)  # fmt: skip
def test_a_wrong_word_to_the_kill_test_ends_it_with_a_message(kill_test, capsys, word, message):
    assert kill_test.main([word]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


@pytest.fixture
def other(monkeypatch):
    """A second process, as a list of the function that changes its message."""
    sent = [np.copy]
    simulate_processes(monkeypatch, 2)
    monkeypatch.setattr(processes, "gather_rows", lambda row: np.stack([row, sent[0](row)]))
    return sent


def test_processes_exchange_a_path_that_is_not_utf_8(other):
    path = "caf\udce9/\u904b"
    assert processes.gather_texts(path) == [path, path]
    processes.check_same_on_all_processes("the path", path)
    other[0] = np.invert
    with pytest.raises(RunError, match="the path differs between the 2 processes"):
        processes.check_same_on_all_processes("the path", path)


@pytest.mark.parametrize("start", ["", "a", "ab", "\udce9"])
def test_a_long_text_is_cut_between_characters(other, start):
    told = processes.gather_texts(start + "\u904b" * 1000)[0]
    assert told == start + "\u904b" * ((2048 - len(start)) // 3)
    assert processes.gather_texts("x" * 5000)[0] == "x" * 2048


def test_long_array_of_the_first_process_is_exact(other):
    values = np.random.RandomState(0).rand(700, 2)
    np.testing.assert_array_equal(processes.array_of_first_process(values), values)
    other[0] = np.invert  # that of the other process is not read
    np.testing.assert_array_equal(processes.array_of_first_process(values), values)


@pytest.mark.parametrize("dies", [True, False])
def test_death_is_noticed_while_jax_joins_the_processes(monkeypatch, dies):
    """JAX waits for the dead one until start_timeout, and ends in a stack trace. The twin: all live."""
    first, own = connect_pair()
    ended, reasons, noticed = threading.Event(), [], []

    def end(reason):
        reasons.append(reason)
        ended.set()
        processes._watch.links.clear()  # and so the thread ends, where the process would

    def join(*_, **__):
        if dies:
            first.close()
        noticed.append(ended.wait(PATIENCE if dies else 0.5))

    monkeypatch.setattr(rendezvous, "end_process", end)
    monkeypatch.setattr(rendezvous, "connect", lambda *_: {0: rendezvous.Link(own)})
    monkeypatch.setattr(jax.distributed, "initialize", join)
    monkeypatch.setattr(processes, "_watch", None)
    processes.join_processes(Config.of(coordinator="localhost:1", processes=2, process_id=1))
    with contextlib.suppress(OSError):
        first.sendall(b"goodbye\n")  # else the thread would end pytest
    processes._watch.join(PATIENCE)
    assert noticed == [dies]
    assert [reason.partition(";")[0] for reason in reasons[:1]] == ["process 0 of 2 has died"] * dies
