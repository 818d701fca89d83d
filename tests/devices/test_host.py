"""A command restarts with huge pages if the kernel setting is madvise."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer.devices import host

MODULE = ("python", "-m", "shardformer")
MADVISE = "always [madvise] never"


def find_restart(tmp_path, command=MODULE, environment=None, setting=MADVISE) -> list[str] | None:
    """Returns the restart of a process that was started as `command` with the arguments `train tiny`."""
    path = tmp_path / "enabled"
    if setting:
        path.write_text(setting)
    words = ["train", "tiny"]
    return host.find_restart(words, [*command, *words], environment or {}, path)


@pytest.mark.parametrize("command", [MODULE, ("python", "/venv/bin/shardformer")])
def test_a_command_restarts_with_huge_pages_once(tmp_path, command):
    assert find_restart(tmp_path, command) == [sys.executable, *command[1:], "train", "tiny"]
    assert find_restart(tmp_path, command, {host.TUNABLES: host.HUGE_PAGES}) is None


def test_settings_of_the_user_stay(tmp_path):
    assert find_restart(tmp_path, environment={host.TUNABLES: "glibc.malloc.check=3"}) is None


@pytest.mark.parametrize("program", [[], ["-m", "ipykernel_launcher"], ["script.py"], ["-"]])
def test_another_program_that_calls_the_command_goes_on(tmp_path, program):
    assert find_restart(tmp_path, ["python", *program]) is None


@pytest.mark.parametrize("setting", ["[always] madvise never", "always madvise [never]", None])
def test_other_kernel_settings_restart_nothing(tmp_path, setting):
    assert find_restart(tmp_path, setting=setting) is None


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
    wanted = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_threshold=33554432:glibc.malloc.trim_threshold=67108864"
    assert found.stdout == f"{wanted if asks else None} ['a b', '--help']\n", found.stderr
