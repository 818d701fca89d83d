"""A command restarts with huge pages if the kernel setting is madvise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer.devices import host


def start_as(monkeypatch, command: list[str]) -> None:
    """Makes this process look like one that this command started."""
    monkeypatch.setattr(sys, "orig_argv", command)


@pytest.fixture
def restarts(monkeypatch, tmp_path):
    """The restarts of a process that was started as `python -m shardformer train tiny`."""
    found = []
    monkeypatch.setattr(
        os, "execv", lambda program, words: found.append((program, words, os.environ["GLIBC_TUNABLES"]))
    )
    start_as(monkeypatch, ["python", "-m", "shardformer", "train", "tiny"])
    monkeypatch.setenv("GLIBC_TUNABLES", "")
    monkeypatch.delenv("GLIBC_TUNABLES")
    monkeypatch.setattr(host, "SETTING", tmp_path / "enabled")
    host.SETTING.write_text("always [madvise] never")
    return found


def test_a_command_restarts_with_huge_pages_once(restarts):
    for _ in range(2):
        host.restart_with_huge_pages(["train", "tiny"])
    again = [sys.executable, "-m", "shardformer", "train", "tiny"]
    assert restarts == [(sys.executable, again, "glibc.malloc.hugetlb=1")]


def test_settings_of_the_user_stay(restarts, monkeypatch):
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=3")
    host.restart_with_huge_pages(["train", "tiny"])
    assert not restarts


def test_the_installed_command_restarts(restarts, monkeypatch):
    start_as(monkeypatch, ["python", "/venv/bin/shardformer", "train", "tiny"])
    host.restart_with_huge_pages(["train", "tiny"])
    assert restarts[0][1] == [sys.executable, "/venv/bin/shardformer", "train", "tiny"]


@pytest.mark.parametrize("program", [[], ["-m", "ipykernel_launcher"], ["script.py"], ["-"]])
def test_another_program_that_calls_the_command_goes_on(restarts, monkeypatch, program):
    start_as(monkeypatch, ["python", *program, "train", "tiny"])
    host.restart_with_huge_pages(["train", "tiny"])
    assert not restarts


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_other_kernel_settings_restart_nothing(restarts, setting):
    host.SETTING.write_text(setting) if setting else host.SETTING.unlink()
    host.restart_with_huge_pages(["train", "tiny"])
    assert not restarts


@pytest.mark.multiprocess
def test_a_script_of_the_user_runs_with_huge_pages(tmp_path):
    (tmp_path / "script.py").write_text("import os, sys\nprint(os.environ.get('GLIBC_TUNABLES'), sys.argv[1:])\n")
    environment = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"}
    command = [sys.executable, "-m", "shardformer", "legacy", "script.py", "a b", "--help"]
    path = str(Path(host.__file__).parents[2])
    found = subprocess.run(
        command, cwd=tmp_path, env=environment | {"PYTHONPATH": path}, capture_output=True, text=True
    )
    asks = host.SETTING.exists() and "[madvise]" in host.SETTING.read_text()
    assert found.stdout == f"{'glibc.malloc.hugetlb=1' if asks else None} ['a b', '--help']\n", found.stderr
