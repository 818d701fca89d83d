"""Public programs, unedited and migrated, on today's jax: the numbers that they had under jax 0.4.13.

PUBLIC_PROGRAMS names a folder with a folder for each program, as it was published:
diffrax: `pip download diffrax==0.1.1`; brax: `pip download brax==0.9.0`, each unpacked (with mujoco 2.3.7 and
jaxopt 0.8.5: jaxopt 0.8 itself imports removed names);
easy_neural_ode: https://github.com/jacobjinkelly/easy-neural-ode; sparse_mixers/sparse_mixers: that folder of
https://github.com/google-research/google-research; progen: https://github.com/lucidrains/progen at 3054b29;
vietTTS: https://github.com/NTT123/vietTTS at f5c5d09 without its notebooks;
objax/objax: that folder of https://github.com/google/objax at 9dd7dc3;
swarm_jax: https://github.com/kingoflolz/swarm-jax at 62cd943;
nucleotide: https://github.com/instadeepai/nucleotide-transformer at 9fcf2c7 (with boto3, jmp, joblib, regex and tqdm).
Without a program its tests do not run, and say so.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.launch import ROOT

HERE = Path(__file__).parent
GOLDENS = json.loads((HERE / "goldens" / "public_programs.json").read_text())
# XLA optimises as it did in the recorded runs: without that, roundings to float32 and back stay in float64 programs.
DEVICES = "--xla_force_host_platform_device_count=8"


def sources(program):
    folder = Path(os.environ.get("PUBLIC_PROGRAMS", "/nowhere"), program)
    if not folder.is_dir():
        pytest.skip(f"did not run: PUBLIC_PROGRAMS names no folder with {program}")
    return folder


def run(mode, program, folder, tmp_path):
    """Returns the arrays that a program gives in a separate process."""
    out = tmp_path / f"{mode}.json"
    command = [sys.executable, str(HERE / "public_programs.py"), mode, program, str(folder), str(out)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": DEVICES}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(out.read_text())


def legacy(folder, *words):
    command = [sys.executable, "-m", "shardformer", "legacy", *words, "."]
    return subprocess.run(
        command, cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )


def assert_as_recorded(arrays, program):
    golden = GOLDENS[program]["arrays"]
    assert list(map(len, arrays)) == list(map(len, golden))
    for ours, theirs in zip(arrays, golden, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-6 * max(map(abs, theirs), default=0.0))


@pytest.mark.parametrize("program", sorted(GOLDENS))
def test_program_is_as_published(program):
    folder = sources(program)
    files = sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix())
    content = b"".join(file.read_bytes() for file in files)
    assert hashlib.sha256(content).hexdigest() == GOLDENS[program]["sha256"]


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(GOLDENS))
def test_unedited_program_gives_the_recorded_numbers(program, tmp_path):
    assert_as_recorded(run("legacy", program, sources(program), tmp_path), program)


@pytest.mark.slow
@pytest.mark.parametrize("program", sorted(GOLDENS))
def test_migrated_program_gives_the_recorded_numbers(program, tmp_path):
    tree = tmp_path / "tree"
    shutil.copytree(sources(program), tree)
    migration = legacy(tree, "--migrate")
    assert migration.stderr.endswith(" 0 places left\n")
    subprocess.run(["git", "init", "-q"], cwd=tree, check=True)
    subprocess.run(["git", "apply", "--allow-empty", "-"], cwd=tree, input=migration.stdout, text=True, check=True)
    check = legacy(tree, "--check")
    assert (check.returncode, "0 uses of 0 removed names" in check.stdout) == (0, True), check.stdout
    arrays = run("alone", program, tree, tmp_path)
    assert_as_recorded(arrays, program)
    arrays[0][0] += 1e-4
    with pytest.raises(AssertionError):
        assert_as_recorded(arrays, program)
