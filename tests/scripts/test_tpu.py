"""scripts/tpu.sh with a stand-in for gcloud, whose workers run their commands in folders of this machine."""

import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch import ROOT, SECONDS

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
        # Called a hundred times, so without a shim of pyenv before python3 and without site-packages.
        for name, program in (("python3", ""), ("gcloud", ROOT / "tests" / "scripts" / "gcloud")):
            command = folder / "bin" / name
            command.write_text(f'#!/bin/sh\nexec {sys.executable} -IS {program} "$@"\n')
            command.chmod(0o755)
        for name in ("ssh-add", "ssh-agent", "ssh-keygen"):
            (folder / "bin" / name).symlink_to(ROOT / "tests" / "scripts" / "ssh_tools")
        self.key = folder / "home" / ".ssh" / "google_compute_engine"
        self.key.parent.mkdir(parents=True)
        self.key.touch()
        self.environment = os.environ | {
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}", "GCLOUD_STATE": str(self.state), "SSH_AUTH_SOCK": "agent",
            "RETRIES": "4", "PAUSE": "0.02", "HOME": str(folder / "home"),
        }  # fmt: skip

    def set(self, **state):
        for name, value in state.items():
            (self.state / name).write_text(str(value))

    def __call__(self, *words, status=0):
        command = ["bash", "scripts/tpu.sh", *words]
        ended = subprocess.run(
            command, cwd=self.checkout, env=self.environment, capture_output=True, text=True, timeout=SECONDS
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


def test_failed_request_is_reported_with_its_reason(tpu):
    tpu.set(states="ACCEPTED FAILED")
    said = tpu("create", "pod", "type=v4-16", status=1).stderr
    assert "pod: FAILED: Quota 'TPUSV4' exceeded in zone us-central2-b.\n" in said
    assert "pod was not created" in said


@pytest.mark.multiprocess
@pytest.mark.parametrize("agent", ["agent", "dead", None])
@pytest.mark.parametrize("has_key", [True, False])
def test_key_of_gcloud_is_made_and_added_to_the_agent(tpu, agent, has_key):
    """A first-time user has no key; an agent may lack it, run no more, or not exist."""
    if not has_key:
        tpu.key.unlink()
    tpu.environment.pop("SSH_AUTH_SOCK")
    tpu.environment |= {"SSH_AUTH_SOCK": agent} if agent else {}
    ended = tpu("train", "pod", *SAY_HELLO)
    assert "hello from worker-0" in ended.stdout
    assert ("made the key of gcloud" in ended.stderr) != has_key
    assert (tpu.state / "agent").read_text().split() == [str(tpu.key)]


def test_train_starts_all_workers_and_follows_the_first(tpu):
    ended = tpu("train", "pod", "zone=z", *SAY_HELLO)
    assert "hello from worker-0" in ended.stdout
    for worker in (0, 1):
        assert "hello" in (tpu.state / f"worker-{worker}" / "shardformer" / "train.log").read_text()
    assert not (tpu.state / "worker-1" / "shardformer" / "checkpoints").exists()
    assert all("--zone=z" in call for call in tpu.calls())


@pytest.mark.multiprocess
def test_train_exits_with_the_status_of_the_run(tpu):
    tpu("train", "pod", "--", "bash", "-c", "exit 3", status=3)


def test_slices_are_nodes_of_one_request(tpu):
    tpu("create", "pod", "type=v4-16", "slices=2", "spot=false")
    (created,) = tpu.calls("create")
    assert {"--node-count=2", "--node-prefix=pod"} <= set(created)
    assert "--spot" not in created
    tpu("train", "pod", *SAY_HELLO)
    assert {call[2] for call in tpu.calls("ssh")} == {"pod-0", "pod-1"}


@pytest.mark.multiprocess
def test_refused_connection_is_retried(tpu):
    tpu.set(refusals=3)
    ended = tpu("train", "pod", *SAY_HELLO)
    assert ended.stderr.count("Connection refused") == 3
    assert "hello" in ended.stdout


def test_unreachable_workers_end_train_with_one_line(tpu):
    tpu.set(refusals=1000)
    ended = tpu("train", "pod", *SAY_HELLO, status=1)
    silent = "worker 0 of pod (10.0.0.2), worker 1 of pod (10.0.0.3)"
    assert ended.stderr.splitlines()[-1] == f"the checkout cannot be copied to pod; these do not answer: {silent}"


@pytest.mark.parametrize("command", ["train", "stop"])
def test_unreachable_worker_is_named(tpu, command):
    tpu.set(unreachable="1")
    words = SAY_HELLO if command == "train" else ()
    last = tpu(command, "pod", *words, status=1).stderr.splitlines()[-1]
    assert last.endswith("; these do not answer: worker 1 of pod (10.0.0.3)")


@pytest.mark.multiprocess
@pytest.mark.parametrize(
    "gone",
    [
        {"states": "SUSPENDED ACTIVE"},
        {"states": "ACTIVE", "nodes": "PREEMPTED READY"},
        {"states": "SUSPENDING " * 20 + "SUSPENDED ACTIVE"},  # longer than RETRIES
    ],
)
def test_suspended_tpu_is_created_again(tpu, gone):
    tpu("create", "pod", "type=v4-16", "zone=z")
    tpu.set(**gone)
    assert "hello" in tpu("train", "pod", *SAY_HELLO).stdout
    first, second = tpu.calls("create")
    assert first == second
    assert len(tpu.calls("delete")) == 1


@pytest.mark.multiprocess
def test_preemption_restarts_the_same_run(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu.set(broken="SUSPENDED SUSPENDED ACTIVE")
    ended = tpu("train", "pod", *SAY_HELLO)
    assert "pod was preempted; the run resumes from its newest checkpoint" in ended.stderr
    assert len(tpu.calls("create")) == 2
    starts = [call[-1] for call in tpu.calls("ssh") if "setsid" in call[-1]]
    assert len(starts) == 2
    assert starts[0] == starts[1]
    assert ended.stdout.count("hello from worker-0") == 2


@pytest.mark.multiprocess
def test_preemption_of_another_worker_restarts_the_run(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu.set(states="ACTIVE SUSPENDED SUSPENDED ACTIVE")
    tpu("train", "pod", "--", "bash", "-c", "echo another worker has died; exit 1", status=1)
    assert len([call for call in tpu.calls("ssh") if "setsid" in call[-1]]) == 2


@pytest.mark.multiprocess
def test_broken_connection_does_not_restart_the_run(tpu):
    tpu.set(broken="ACTIVE")
    tpu("train", "pod", *SAY_HELLO)
    assert len([call for call in tpu.calls("ssh") if "setsid" in call[-1]]) == 1


LONG = ("--", "bash", "-c", "trap 'echo saved; exit 0' TERM; echo begun; for i in {1..6000}; do sleep 0.1; done")


def start_training(tpu, *words):
    command = ["bash", "scripts/tpu.sh", "train", "pod", *words]
    return subprocess.Popen(
        command, cwd=tpu.checkout, env=tpu.environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.multiprocess
def test_second_train_follows_the_running_one(tpu):
    """It replaces neither the running command nor its code."""
    training = start_training(tpu, *LONG)
    try:
        assert training.stdout.readline() == "begun\n"
        (tpu.checkout / "setup.py").write_text("# another file")
        second = start_training(tpu, *SAY_HELLO)
        assert "a run is in progress here" in second.stdout.readline()
        tpu("stop", "pod")
        rest, _ = second.communicate(timeout=SECONDS)
        assert "hello" not in rest
        assert "saved" in rest
        assert second.returncode == 0
        for worker in ("worker-0", "worker-1"):
            assert (tpu.state / worker / "shardformer" / "setup.py").read_text() == "# a file of the checkout"
        training.communicate(timeout=SECONDS)
    finally:
        training.kill()


@pytest.mark.multiprocess
def test_processes_that_are_gone_without_a_status_are_reported(tpu):
    training = start_training(tpu, *LONG)
    try:
        assert training.stdout.readline() == "begun\n"
        for worker in ("worker-0", "worker-1"):
            group = int((tpu.state / worker / "shardformer" / "train.pid").read_text())
            os.killpg(group, signal.SIGKILL)
        _, said = training.communicate(timeout=SECONDS)
        assert training.returncode == 1
        assert "the processes of the run on worker 0 of pod are gone and left no exit status" in said
        assert "scripts/tpu.sh logs pod" in said
    finally:
        training.kill()


def test_python_installs_wait_for_the_lock_of_apt(tpu):
    printed = tpu("--print", "train", "pod", *SAY_HELLO).stdout
    assert printed.count("apt-get") == 2
    assert printed.replace("\\", "").count("apt-get -o DPkg::Lock::Timeout=600") == 2


def test_stop_lets_the_run_save_and_end(tpu):
    training = start_training(tpu, *LONG)
    try:
        assert training.stdout.readline() == "begun\n"
        assert "every worker saves and ends" in tpu("stop", "pod").stderr
        rest, _ = training.communicate(timeout=SECONDS)
        assert "saved" in rest
        assert training.returncode == 0
    finally:
        training.kill()


def test_delete_forgets_the_request(tpu):
    tpu("create", "pod", "type=v4-16")
    tpu("delete", "pod")
    assert tpu.calls("delete") == [["queued-resources", "delete", "pod", "--force", "--quiet"]]
    tpu.set(states="NOT_FOUND")
    assert (
        "pod does not exist; create it: scripts/tpu.sh create pod" in tpu("train", "pod", *SAY_HELLO, status=1).stderr
    )


def test_gcloud_error_is_quoted(tpu):
    tpu.set(states="LOGGED_OUT")
    said = tpu("create", "pod", "type=v4-16", status=1).stderr
    assert "You do not currently have an active account" in said
    assert "gcloud fails with the message above" in said


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("create takes the NAME of a TPU", ["create", "Pod_1"]),
        ("create takes type=ACCELERATOR", ["create", "pod"]),
        ("slices is a number of at least 1, got '0'", ["create", "pod", "type=v4-8", "slices=0"]),
        ("spot is true or false, got 'no'", ["create", "pod", "type=v4-8", "spot=no"]),
        ("stop does not take 'now'", ["stop", "pod", "now"]),
        ("train takes out=gs://BUCKET/RUN: the workers share no disk", ["train", "pod", "tiny", "out=run"]),
        ("scripts/tpu.sh create NAME type=v5litepod-16", []),
    ],
)
def test_invalid_arguments(tpu, message, words):
    assert message in tpu(*words, status=2).stderr
    assert not tpu.calls()


@pytest.mark.multiprocess
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
    """A shell can parse the script, and its calls of gcloud are those of the command itself."""
    printed = tpu("--print", *words).stdout
    assert not tpu.calls()
    assert subprocess.run(["bash", "-n"], input=printed, text=True, capture_output=True).stderr == ""
    would = [shlex.split(line)[3:] for line in printed.splitlines() if line.startswith("gcloud ")]
    if "out=gs://bucket/a run" not in words:  # would start a real training
        tpu(*words)
        assert would == tpu.calls()
    assert would
