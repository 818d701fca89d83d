"""Workers that share no disk: a run in a bucket, the death of a worker, and the same losses all the same."""

import csv
import os
import signal
import time

import pytest

from shardformer import checkpoint
from shardformer.storage import location
from tests import runs
from tests.checkpoint import places
from tests.launch import POD_WORKER, QUICK, SECONDS, Forked, finished, free_port, pod

WORDS = ("tiny", "mesh=4x2", "decay_steps=8", "eval_every=100000", "save_every=2")


@pytest.fixture(scope="module")
def expected(tmp_path_factory, text):
    """The losses of one process on a disk."""
    out = tmp_path_factory.mktemp("one") / "run"
    assert runs.train(*WORDS, "steps=8", f"data={text}", f"out={out}") == 0
    return [float(row["loss"]) for row in runs.rows(out)]


def slurm() -> list[dict[str, str]]:
    """Returns the environments that srun gives two tasks."""
    job = {"SLURM_JOB_ID": "7", "SLURM_STEP_NODELIST": "localhost", "SLURM_NTASKS": "2"}
    return [job | {"SLURM_PROCID": task, "SLURM_LOCALID": task} for task in "01"]


@pytest.fixture(scope="module", params=["pod", "slurm"])
def started_by(request):
    """The environments of two workers, and what they run."""
    if request.param == "slurm":
        yield slurm(), QUICK
    else:
        with pod(2) as environments:
            yield environments, POD_WORKER


@pytest.mark.skipif(not places.EMULATORS, reason="did not run: SHARDFORMER_EMULATORS names no Python with moto[server]")
@pytest.mark.usefixtures("emulators")
@pytest.mark.parametrize("victim", [0, 1])
def test_pod_resumes_from_its_bucket_after_a_kill(tmp_path, text, started_by, expected, victim):
    out = f"s3://{places.BUCKET}/pod-{os.getpid()}-{started_by[1] is QUICK}-{victim}"
    data = location(f"s3://{places.BUCKET}/text.txt")
    data.write_bytes(text.read_bytes())
    words = (*WORDS, "steps=100000", f"data={data}", f"out={out}")
    running = start_workers(started_by, tmp_path / "before", *words)
    deadline = time.monotonic() + SECONDS
    while not checkpoint.list_steps(location(out)) and running[0].poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    running[victim].send_signal(signal.SIGKILL)
    status, _, error = [finished(worker) for worker in running][1 - victim]
    assert status not in (0, None)
    assert f"process {victim} of 2 has died" in error

    steps = max(checkpoint.list_steps(location(out))[-1] + 2, 8)
    machines_anew = tmp_path / "after"
    resumed = start_workers(started_by, machines_anew, "--resume", out, f"steps={steps}")
    assert [status for status, *_ in map(finished, resumed)] == [0, 0]
    rows = list(csv.DictReader((location(out) / "metrics.csv").read_bytes().decode().splitlines()))
    assert [int(row["step"]) for row in rows] == list(range(1, steps + 1))
    assert [float(row["loss"]) for row in rows[:8]] == pytest.approx(expected, rel=1e-6)


def start_workers(started_by, folder, *words):
    """Starts two workers with separate caches."""
    environments, program = started_by
    port = str(free_port())
    own = [{"JAX_COORDINATOR_PORT": port, "SHARDFORMER_CACHE": str(folder / name)} for name in ("first", "second")]
    both = [one | other for one, other in zip(environments, own, strict=True)]
    return [Forked("train", *words, environment=each, program=program) for each in both]
