"""scripts/tpu.sh with a stand-in for gcloud, whose workers run what they are told in folders of this machine."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SAY_HELLO = ("--", "bash", "-c", "echo hello from $(basename $HOME); test -e setup.py")


class Tpu:
    """A copy of the scripts, and the stand-in's state."""

    def __init__(self, folder: Path):
        self.state, self.checkout = folder / "state", folder / "checkout"
        self.state.mkdir()
        shutil.copytree(ROOT / "scripts", self.checkout / "scripts")
        (self.checkout / "setup.py").write_text("# a file of the checkout")
        (self.checkout / ".gitignore").write_text("/.tpu/\n/checkpoints/\n")
        (self.checkout / "checkpoints").mkdir()
        (self.checkout / "checkpoints" / "large").write_text("stays here")
        subprocess.run(["git", "init", "-q"], cwd=self.checkout, check=True)
        (folder / "bin").mkdir()
        # Called a hundred times: without what python3 may start first (a shim of pyenv), and without site-packages.
        for name, program in (("python3", ""), ("gcloud", ROOT / "tests" / "scripts" / "gcloud")):
            command = folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {program} "$@"\n')
            command.chmod(0o755)
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GCLOUD_STATE": str(self.state), "SSH_AUTH_SOCK": "agent",
            "RETRIES": "4", "PAUSE": "0.02",
        }  # fmt: skip

    def set(self, **state):
        for name, value in state.items():
            (self.state / name).write_text(str(value))

    def __call__(self, *words, status=0):
        command = ["bash", "scripts/tpu.sh", *words]
        ended = subprocess.run(
            command, cwd=self.checkout, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert ended.returncode == status, ended
        return ended

    def calls(self, word="") -> list[list[str]]:
        path = self.state / "calls"
        every = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [call[2:] for call in every if not word or call[3] == word]


@pytest.fixture
def tpu(tmp_path):
    return Tpu(tmp_path)


def test_create_waits_until_the_tpu_is_ready(tpu):
    tpu.set(states="ACCEPTED WAITING_FOR_RESOURCES WAITING_FOR_RESOURCES PROVISIONING ACTIVE", nodes="CREATING READY")
    said = tpu("create", "pod", "type=v4-16", "zone=us-central2-b", "project=mine").stderr
    assert said.count("pod: WAITING_FOR_RESOURCES") == 1
    assert tpu.calls("create") == [
        ["queued-resources", "create", "pod", "--node-id=pod", "--spot", "--accelerator-type=v4-16",
         "--runtime-version=tpu-ubuntu2204-base", "--zone=us-central2-b", "--project=mine"]
    ]  # fmt: skip


def test_failed_request_is_reported(tpu):
    tpu.set(states="ACCEPTED FAILED")
    assert "pod was not created" in tpu("create", "pod", "type=v4-16", status=1).stderr


def test_train_starts_all_workers_and_follows_the_first(tpu):
    ended = tpu("train", "pod", "zone=z", *SAY_HELLO)
    assert "hello from worker-0" in ended.stdout
    for worker in (0, 1):
        assert "hello" in (tpu.state / f"worker-{worker}" / "shardformer" / "train.log").read_text()
    assert not (tpu.state / "worker-1" / "shardformer" / "checkpoints").exists()
    assert all("--zone=z" in call for call in tpu.calls())


def test_train_exits_with_the_status_of_the_run(tpu):
    tpu("train", "pod", "--", "bash", "-c", "exit 3", status=3)


def test_slices_are_nodes_of_one_request(tpu):
    tpu("create", "pod", "type=v4-16", "slices=2", "spot=false")
    (created,) = tpu.calls("create")
    assert {"--node-count=2", "--node-prefix=pod"} <= set(created)
    assert "--spot" not in created
    tpu("train", "pod", *SAY_HELLO)
    assert {call[2] for call in tpu.calls("ssh")} == {"pod-0", "pod-1"}


def test_refused_connection_is_retried(tpu):
    tpu.set(refusals=3)
    ended = tpu("train", "pod", *SAY_HELLO)
    assert ended.stderr.count("Connection refused") == 3
    assert "hello" in ended.stdout


def test_unreachable_workers_end_train_with_one_line(tpu):
    tpu.set(refusals=1000)
    ended = tpu("train", "pod", *SAY_HELLO, status=1)
    assert ended.stderr.splitlines()[-1] == "the checkout cannot be copied to pod"


@pytest.mark.parametrize("gone", [{"states": "SUSPENDED ACTIVE"}, {"states": "ACTIVE", "nodes": "PREEMPTED READY"}])
def test_suspended_tpu_is_created_again(tpu, gone):
    tpu("create", "pod", "type=v4-16", "zone=z")
    tpu.set(**gone)
    assert "hello" in tpu("train", "pod", *SAY_HELLO).stdout
    first, second = tpu.calls("create")
    assert first == second
    assert len(tpu.calls("delete")) == 1


def test_preemption_restarts_the_same_run(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu.set(broken="SUSPENDED SUSPENDED ACTIVE")
    ended = tpu("train", "pod", *SAY_HELLO)
    assert "pod was preempted; the run goes on from its newest checkpoint" in ended.stderr
    assert len(tpu.calls("create")) == 2
    starts = [call[-1] for call in tpu.calls("ssh") if "setsid" in call[-1]]
    assert len(starts) == 2
    assert starts[0] == starts[1]
    assert ended.stdout.count("hello from worker-0") == 2


def test_preemption_of_another_worker_restarts_the_run(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu.set(states="ACTIVE SUSPENDED SUSPENDED ACTIVE")
    tpu("train", "pod", "--", "bash", "-c", "echo another worker has died; exit 1", status=1)
    assert len([call for call in tpu.calls("ssh") if "setsid" in call[-1]]) == 2


def test_broken_connection_does_not_restart_the_run(tpu):
    tpu.set(broken="ACTIVE")
    tpu("train", "pod", *SAY_HELLO)
    assert len([call for call in tpu.calls("ssh") if "setsid" in call[-1]]) == 1


def test_stop_lets_the_run_save_and_end(tpu):
    long = "trap 'echo saved; exit 0' TERM; echo begun; for i in {1..600}; do sleep 0.1; done"
    words = ["bash", "scripts/tpu.sh", "train", "pod", "--", "bash", "-c", long]
    training = subprocess.Popen(words, cwd=tpu.checkout, env=tpu.environment, stdout=subprocess.PIPE, text=True)
    try:
        assert training.stdout.readline() == "begun\n"
        assert "every worker saves and ends" in tpu("stop", "pod").stderr
        rest, _ = training.communicate(timeout=60)
        assert "saved" in rest
        assert training.returncode == 0
    finally:
        training.kill()


def test_delete_forgets_the_request(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu("delete", "pod")
    assert tpu.calls("delete") == [["queued-resources", "delete", "pod", "--force", "--quiet"]]
    tpu.set(states="NOT_FOUND")
    assert "pod is not there; create it: scripts/tpu.sh create pod" in tpu("train", "pod", *SAY_HELLO, status=1).stderr


def test_gcloud_error_is_quoted(tpu):
    tpu.set(states="LOGGED_OUT")
    said = tpu("create", "pod", "type=v4-16", status=1).stderr
    assert "You do not currently have an active account" in said
    assert "gcloud fails, as it says above" in said


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("create takes the NAME of a TPU", ["create", "Pod_1"]),
        ("create takes type=ACCELERATOR", ["create", "pod"]),
        ("slices is a number of at least 1, got '0'", ["create", "pod", "type=v4-8", "slices=0"]),
        ("spot is true or false, got 'no'", ["create", "pod", "type=v4-8", "spot=no"]),
        ("stop does not know 'now'", ["stop", "pod", "now"]),
        ("train takes out=gs://BUCKET/RUN: the workers share no disk", ["train", "pod", "tiny", "out=run"]),
        ("scripts/tpu.sh create NAME type=v5litepod-16", []),
    ],
)
def test_invalid_arguments(tpu, message, words):
    assert message in tpu(*words, status=2).stderr
    assert not tpu.calls()


@pytest.mark.parametrize(
    "words",
    [
        ["create", "pod", "type=v4-16"],
        ["train", "pod", "--", "bash", "-c", "echo \"it's\" '$HOME'"],
        ["train", "pod", "tiny", "out=gs://bucket/a run"],
        ["delete", "pod"],
    ],
)
def test_print_writes_a_script_of_the_same_calls(tpu, words):
    """A shell can read it; and what gcloud is called with is what it is called with in earnest."""
    printed = tpu("--print", *words).stdout
    assert not tpu.calls()
    assert subprocess.run(["bash", "-n"], input=printed, text=True, capture_output=True).stderr == ""
    would = [shlex.split(line)[3:] for line in printed.splitlines() if line.startswith("gcloud ")]
    if "out=gs://bucket/a run" not in words:  # which would train in earnest
        tpu(*words)
        assert would == tpu.calls()
    assert would
