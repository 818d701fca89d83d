"""scripts/slurm.sh after the end of srun, with stand-ins for srun and scontrol."""

import os
import subprocess
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("ends_in", "status", "asked"),
    [(60, 0, "requeue 7\n"), (100_000, 0, ""), (60, 3, ""), (None, 0, "")],
)
def test_run_at_its_time_limit_is_queued_again(tmp_path, ends_in, status, asked):
    log = tmp_path / "asked"
    log.touch()
    for name, line in ("srun", f"exit {status}"), ("scontrol", f'echo "$@" >>{log}'):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)
    environment = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7"}
    if ends_in is not None:
        environment["SLURM_JOB_END_TIME"] = str(int(time.time()) + ends_in)
    ended = subprocess.run(["bash", "scripts/slurm.sh", "tiny"], cwd=ROOT, env=environment, check=False)
    assert ended.returncode == status
    assert log.read_text() == asked
