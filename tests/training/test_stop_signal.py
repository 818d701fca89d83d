"""A real run whose reader goes away, and then its terminal: it trains on, and stops with everything saved."""

import csv
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from shardformer import checkpoint
from shardformer.training import stop_signal

SECONDS = 240


def test_a_hangup_after_the_reader_is_gone_stops_with_the_run_saved(tmp_path, text):
    out = tmp_path / "run"
    words = (
        "train",
        "tiny",
        "mesh=1x1",
        f"data={text}",
        f"out={out}",
        "steps=100000",
        "eval_every=100000",
        "log_every=1",
    )
    command = [sys.executable, "-m", "shardformer", *words]
    pipe = subprocess.PIPE
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=pipe, stderr=subprocess.STDOUT, cwd=root, env=environment)
    try:
        assert process.stdout.readline()
        process.stdout.close()
        metrics, deadline = out / "metrics.csv", time.monotonic() + SECONDS
        while not (metrics.exists() and metrics.read_bytes().count(b"\n") > 5):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
    with open(metrics, newline="") as file:
        last = int([*csv.DictReader(file)][-1]["step"])
    assert checkpoint.list_steps(out)[-1] == last
    assert not (out / ".lock").exists()


def test_a_signal_before_the_processes_have_joined_is_not_lost(monkeypatch):
    with stop_signal.StopSignal() as stop:
        signal.raise_signal(signal.SIGTERM)
        heard = []
        signal.signal(signal.SIGTERM, lambda *_: heard.append(1))  # as JAX takes it over
        monkeypatch.setattr(stop_signal.jax.distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(stop_signal.multihost_utils, "reached_preemption_sync_point", lambda _: bool(heard))
        assert stop.is_requested(1)
        assert stop.is_requested(2)
        assert heard == [1]
