"""Real processes: signals at any moment, exit statuses, and two of them that train as one."""

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardformer import checkpoint, config
from tests import runs

SECONDS = 240  # more than any of them takes on a busy machine
ROOT = Path(__file__).parents[1]
STEPS = 100
WORDS = ("tiny", "mesh=2x2", f"steps={STEPS}", "dropout=0.1", "log_every=1", "eval_every=45", "eval_batches=1",
         "save_every=20")  # fmt: skip


# A pod's mesh may put its hosts' devices in turns along dp.
INTERLEAVED = """
import sys
import jax, numpy as np
from shardformer import mesh
from shardformer.__main__ import main
turns = lambda config: np.array(jax.devices()).reshape(2, 2, 2).transpose(1, 0, 2).reshape(config.dp, config.mp)
mesh.make = lambda config: jax.sharding.Mesh(turns(config), mesh.AXES)
sys.exit(main())
"""


def start(*words, environment: dict | None = None, program=("-m", "shardformer")) -> subprocess.Popen:
    command = [sys.executable, *program, *map(str, words)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"} | (environment or {})
    pipe = subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def finished(process: subprocess.Popen) -> tuple[int, str, str]:
    try:
        out, error = process.communicate(timeout=SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()
        pytest.fail(f"still running after {SECONDS} s: {process.communicate()}")
    return process.returncode, out, error


def signalled(number: signal.Signals, row: int, out: Path, *words) -> tuple[int, str, str]:
    """Starts a run and signals it when it has written so many rows."""
    process = start("train", *words)
    deadline = time.monotonic() + SECONDS
    while process.poll() is None and time.monotonic() < deadline:
        if (out / "metrics.csv").exists() and len((out / "metrics.csv").read_bytes().splitlines()) > row:
            break
        time.sleep(0.005)
    process.send_signal(number)
    return finished(process)


@pytest.fixture(scope="module")
def whole(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("whole") / "run"
    assert runs.train(*WORDS, f"data={text}", f"out={out}") == 0
    return out


def test_a_kill_and_two_signals_cost_nothing_but_time(tmp_path, text, whole):
    """The kill comes between two checkpoints; scripts/kill_test.py kills at any moment."""
    out = tmp_path / "run"
    new = (*WORDS, f"data={text}", f"out={out}")
    assert signalled(signal.SIGKILL, 35, out, *new)[0] == -signal.SIGKILL
    for number, row in ((signal.SIGTERM, 50), (signal.SIGINT, 70)):
        status, said, error = signalled(number, row, out, "--resume", out)
        assert (status, error) == (0, "")
        assert f"{number.name}: stopped after step {checkpoint.list_steps(out)[-1]} of {STEPS}" in said
        assert "go on with: python -m shardformer train --resume" in said
    assert runs.train("--resume", out) == 0
    at = checkpoint.step_folder(out, STEPS) / "arrays.npy"
    assert at.read_bytes() == (checkpoint.step_folder(whole, STEPS) / "arrays.npy").read_bytes()
    assert runs.rows(out) == runs.rows(whole)


def test_a_wrong_command_ends_with_its_status_and_one_line():
    running = [start(), start("train", "tyny"), start("train", "tiny", "mesh=3x1", "out=/dev/null/run")]
    for process, message in zip(
        running, ["", "unknown preset 'tyny'", "batch=8 does not divide over dp=3"], strict=True
    ):
        status, said, error = finished(process)
        assert status == 2
        assert message in error
        assert len(error.splitlines()) == bool(message)
        assert bool(said) != bool(message)  # no command at all: how to use it


def test_the_kill_test_runs():
    """One kill here, so that the script stays right."""
    command = [sys.executable, "scripts/kill_test.py", "kills=1", "steps=3"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=2 * SECONDS)
    assert ended.returncode == 0, ended
    assert " 0 failures" in ended.stdout


@pytest.mark.parametrize(
    ("word", "message"),
    [("5", "expected key=value, got '5'"), ("kils=5", "did you mean 'kills'"), ("out=/not/there", "is no folder"),
     ("steps=2", "3 steps at least")],
)  # fmt: skip
def test_a_wrong_word_to_the_kill_test_ends_it_with_a_message(word, message):
    command = [sys.executable, "scripts/kill_test.py", word]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=SECONDS)
    assert ended.returncode == 2
    assert message in ended.stderr
    assert len(ended.stderr.splitlines()) == 1


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


def losses(out: Path) -> list[float]:
    return [float(row["loss"]) for row in runs.rows(out)]


def processes(
    *commands, program=("-m", "shardformer"), send: signal.Signals | None = None, to: int = 0, heartbeat: int = 120
):
    """(status, output, error) of processes that start together; one may be signalled once they train."""
    keys = (f"coordinator=localhost:{free_port()}", f"processes={len(commands)}", f"heartbeat={heartbeat}")
    running = [start(*words, *keys, f"process_id={i}", program=program) for i, words in enumerate(commands)]
    try:
        if send:
            out = Path(next(word for word in commands[0] if word.startswith("out=")).removeprefix("out="))
            deadline = time.monotonic() + SECONDS
            while time.monotonic() < deadline and not (checkpoint.list_steps(out) and running[0].poll() is None):
                time.sleep(0.05)
            running[to].send_signal(send)
        return [finished(process) for process in running]
    finally:
        for process in running:
            process.kill()


TOGETHER = ("tiny", "mesh=4x2", "steps=6", "decay_steps=8", "eval_every=3", "save_every=3")


@pytest.fixture(scope="module")
def two(tmp_path_factory, text):
    """A run of two processes, and what they said."""
    out = tmp_path_factory.mktemp("two") / "run"
    return out, processes(*[("train", *TOGETHER, f"data={text}", f"out={out}")] * 2)


@pytest.fixture(scope="module")
def one(tmp_path_factory, text):
    """The same run of one process, and two steps more."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert runs.train(*TOGETHER, f"data={text}", f"out={out}") == 0
    assert runs.train("--resume", out, "steps=8") == 0
    return out


def check_as_one(out, results, one):
    assert [status for status, *_ in results] == [0, 0], results
    assert "best checkpoint: step" in results[0][1]
    first, second = (set(said.splitlines()) for _, said, _ in results)  # Gloo's greetings, cut by each other, in both
    own = {line for line in first if not re.search(r"\[Gloo]|peer ranks|^[ \d]*$", line)}
    assert len(own) > 10
    assert not own & second  # process 0 alone speaks
    assert checkpoint.list_steps(out) == [3, 6]
    assert config.read_config(out).mesh == "4x2"
    assert losses(out) == pytest.approx(losses(one)[:6], rel=1e-6)
    assert len(losses(out)) == 6


def test_two_processes_train_as_one(two, one):
    out, results = two
    check_as_one(out, results, one)
    names = {path.name for path in checkpoint.newest_step_folder(out).glob("arrays*")}
    assert names == {"arrays-00000-of-00002.npy", "arrays-00001-of-00002.npy"}
    for name in ("config.json", "step_00000006/config.json"):
        assert "coordinator" not in (out / name).read_text()


def test_two_processes_whose_devices_take_turns(tmp_path, text, one):
    out = tmp_path / "run"
    results = processes(*[("train", *TOGETHER, f"data={text}", f"out={out}")] * 2, program=("-c", INTERLEAVED))
    check_as_one(out, results, one)


def test_one_process_goes_on_with_the_run_of_two_on_another_mesh(tmp_path, two, one):
    out = shutil.copytree(two[0], tmp_path / "run")
    assert runs.train("--resume", out, "steps=8", "mesh=1x8", "scan=false") == 0
    assert losses(out) == pytest.approx(losses(one), rel=1e-4)


def test_damage_that_one_process_finds_sends_all_back(tmp_path, two, one):
    out = shutil.copytree(two[0], tmp_path / "run")
    folder = checkpoint.step_folder(out, 6)
    leaves = json.loads((folder / "manifest.json").read_text())["leaves"]
    (piece,) = [piece for piece in leaves["params/transformer/layers/q"]["pieces"] if piece["index"][2] == [16, 32]]
    broken, last = folder / piece["file"], piece["offset"] + piece["bytes"] - 1
    raw = broken.read_bytes()
    broken.write_bytes(raw[:last] + bytes([raw[last] ^ 1]) + raw[last + 1 :])
    # On this mesh the second process alone needs those columns.
    results = processes(*[("train", "--resume", str(out), "steps=8", "mesh=1x8")] * 2)
    assert [status for status, *_ in results] == [0, 0], results
    assert f"process 1: {broken} is damaged" in results[0][1]
    assert "and the run goes on from step 3" in results[0][1]
    assert (out / "step_00000006.damaged").is_dir()
    assert checkpoint.list_steps(out)[-2:] == [6, 8]
    assert losses(out) == pytest.approx(losses(one), rel=1e-4)


@pytest.mark.parametrize("victim", [0, 1])
def test_when_one_process_is_killed_the_other_ends_and_says_so(tmp_path, text, victim):
    words = ("train", "tiny", "mesh=4x2", "steps=100000", "decay_steps=8", "eval_every=100000", "save_every=20",
             f"data={text}")  # fmt: skip
    start = time.monotonic()
    results = processes(*[(*words, f"out={tmp_path}/run")] * 2, send=signal.SIGKILL, to=victim, heartbeat=10)
    assert results[victim][0] == -signal.SIGKILL
    status, _, error = results[1 - victim]
    assert status not in (0, None)
    assert error.splitlines()[-1].startswith(f"shardformer: failed: process {victim} of 2 has died; ")
    assert time.monotonic() - start < SECONDS
    assert runs.train("--resume", tmp_path / "run", f"steps={checkpoint.list_steps(tmp_path / 'run')[-1] + 1}") == 0


def test_a_folder_that_is_in_use_is_refused_by_all(tmp_path, text):
    words = ("train", "tiny", "mesh=4x2", f"data={text}", f"out={tmp_path}/run")
    with checkpoint.lock_folder(tmp_path / "run"):
        for status, _, error in processes(*[words] * 2):
            assert status == 2
            assert f"{tmp_path}/run is in use by process {os.getpid()}" in error


@pytest.mark.parametrize(("count", "number"), [(1, signal.SIGTERM), (2, signal.SIGTERM)])
def test_a_signal_stops_all_processes_at_one_step(tmp_path, text, count, number):
    """JAX's own service takes SIGTERM over, on a single TPU VM as well."""
    out = tmp_path / "run"
    words = ("train", "tiny", "mesh=4x2", "steps=100000", "eval_every=100000", "save_every=20", f"data={text}")
    results = processes(*[(*words, f"out={out}")] * count, send=number)
    assert [status for status, *_ in results] == [0] * count, results
    assert f"stopped after step {checkpoint.list_steps(out)[-1]} of 100000" in results[0][1]


def test_processes_that_start_differently_are_told(tmp_path, text):
    words = ("train", "tiny", "mesh=4x2", "steps=6", f"data={text}", f"out={tmp_path}/run")
    for status, _, error in processes(words, (*words, "lr=1e-2")):
        assert status == 1
        assert "the configuration or the newest checkpoint differs between the 2 processes" in error
    assert not (tmp_path / "run").exists()


def test_processes_without_a_shared_disk_are_told(tmp_path, text):
    words = ("train", "tiny", "mesh=4x2", "steps=6", f"data={text}")
    for status, _, error in processes((*words, f"out={tmp_path}/a"), (*words, f"out={tmp_path}/b")):
        assert status == 1
        assert "must be on a disk that all share or in a bucket" in error
