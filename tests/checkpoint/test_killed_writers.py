"""kill -9 and SIGSTOP of processes that save into a bucket: no partial checkpoint is visible, and none is lost."""

import os
import signal
import subprocess
import sys

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import lease
from shardformer.storage import bucket
from tests.checkpoint import places, writers
from tests.checkpoint.cases import here
from tests.launch import ROOT

NOBODY = -1
pytestmark = pytest.mark.skipif(not places.EMULATORS, reason="did not run: SHARDFORMER_EMULATORS names no Python")


@pytest.fixture(params=places.KINDS[2:])
def out(request, emulators, tmp_path):
    return places.new_place(request.param, tmp_path)


@pytest.fixture
def rounds(out):
    """Starts a round of `writers` and returns what it says of each process."""
    command = [sys.executable, "-m", "tests.checkpoint.writers", str(out)]
    process = subprocess.Popen(command, cwd=ROOT, env=own_environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE)

    def run(step: int, victim: int = NOBODY, at: int = -1) -> list[str]:
        process.stdin.write(f"{step} {victim} {at} {int(signal.SIGKILL)}\n".encode())
        process.stdin.flush()
        lines = (line.decode().split() for line in process.stdout)  # Gloo prints other lines
        return next(words[1:] for words in lines if words[:1] == ["ended"])

    yield run
    process.stdin.close()
    assert process.wait(60) == 0


def own_environment() -> dict[str, str]:
    """One CPU device for each process."""
    return {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}


def restore(out, step: int) -> np.ndarray:
    like = {"x": jax.ShapeDtypeStruct((writers.ROWS,), np.float32, sharding=here())}
    return np.asarray(checkpoint.restore(checkpoint.step_folder(out, step), like)["x"])


def test_kill_before_any_put_of_three_writers(out, rounds):
    counts = [int(count) for count in rounds(1)]
    assert counts == [6, 4, 4]  # parts; and reports, or documents and the manifest
    for victim, count in enumerate(counts):
        for at in range(count):
            ends = rounds(2, victim, at)
            assert ends[victim] == "dead"
            assert checkpoint.list_steps(out) == [1], (victim, at)
            np.testing.assert_array_equal(restore(out, 1), writers.value(1))
    assert any("step_00000002" in name for name in bucket.list_objects(out))  # what the last of them left
    assert [int(count) for count in rounds(2)] == counts
    assert checkpoint.list_steps(out) == [1, 2]
    np.testing.assert_array_equal(restore(out, 2), writers.value(2))
    assert len({name.split("/")[1] for name in bucket.list_objects(out) if name.startswith("step_00000002")}) == 2


FROZEN = """
import os, signal, sys
import jax, jax.numpy as jnp
jax.config.update("jax_platforms", "cpu")
from shardformer import checkpoint
from shardformer.checkpoint import lease
from shardformer.storage import location
from tests.checkpoint.writers import count_puts

out = location(sys.argv[1])
with checkpoint.lock_folder(out, lease.TIMES._replace(renew=0.1)) as lock:
    count_puts(int(sys.argv[2]), signal.SIGSTOP)
    try:
        checkpoint.save(out, 40, {"x": jnp.zeros(4)}, {}, lock)
    except checkpoint.FolderLost as error:
        sys.exit(f"lost: {error}")
    except Exception as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


@pytest.mark.parametrize("at", [0, 1, 2], ids=["part", "document", "manifest"])
def test_frozen_writer_does_not_publish(out, at):
    """The twin: with the lease still its own, it does."""
    command = [sys.executable, "-c", FROZEN, str(out), str(at)]
    for is_taken in (True, False):
        process = subprocess.Popen(command, cwd=ROOT, env=own_environment(), stderr=subprocess.PIPE, text=True)
        assert os.WIFSTOPPED(os.waitpid(process.pid, os.WUNTRACED)[1])
        if is_taken:
            with checkpoint.lock_folder(out, lease.TIMES._replace(expire=1.0)):
                os.kill(process.pid, signal.SIGCONT)
                _, error = process.communicate(timeout=60)
            assert process.returncode == 1
            assert f"has taken {out} over" in error
            assert checkpoint.list_steps(out) == []
        else:
            os.kill(process.pid, signal.SIGCONT)
            _, error = process.communicate(timeout=60)
            assert process.returncode == 0, error
            assert checkpoint.list_steps(out) == [40]
