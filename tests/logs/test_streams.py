"""Unwritable streams: the process that prints to them continues and exits with status 0."""

import os
import subprocess
import sys

import pytest

SCRIPT = """
import os, sys
from shardformer.logs.streams import lasting_output
with lasting_output():
    sys.stdin.read()
    with open(sys.argv[1], "w") as file:
        for _ in range(3):
            print("to stdout", flush=True)
            print("to stderr", file=sys.stderr, flush=True)
        file.write("done")
"""


@pytest.mark.parametrize(
    "redirection",
    ["", "| head -0", ">&-", "2>&-", ">&- 2>&- <&-", "<&-", "> /dev/full", "> /dev/full 2>&1", ">&- 2>/dev/full"],
)
def test_work_goes_on(tmp_path, redirection):
    command = f'set -o pipefail; "{sys.executable}" -c \'{SCRIPT}\' "{tmp_path}/file" {redirection}'
    ended = subprocess.run(["bash", "-c", command], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "file").read_text() == "done"
    assert "Traceback" not in ended.stderr
    if not redirection:
        assert (ended.stdout, ended.stderr) == ("to stdout\n" * 3, "to stderr\n" * 3)


def test_without_it_a_full_device_ends_the_work(tmp_path):
    script = SCRIPT.replace("with lasting_output():", "if True:")
    command = ["bash", "-c", f'"{sys.executable}" -c \'{script}\' "{tmp_path}/file" > /dev/full']
    assert subprocess.run(command, capture_output=True, env=os.environ).returncode != 0
    assert (tmp_path / "file").read_text() == ""
