"""The range of JAX's releases, and programs that some of them compile wrongly."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import jaxlib
import pytest

from shardformer import jax_releases, session
from shardformer.__main__ import main
from shardformer.errors import UsageError
from shardformer.logs import command_start

ROOT = Path(__file__).parents[1]
IS_FAULTY = jaxlib.__version__ in jax_releases.FAULTY_FUSIONS
# The programs of jax#39103 (0.10.2 computes a wrong last row) and jax#40412 (0.10.2 crashes).
PROGRAM = """
import jax
import jax.numpy as jnp
import numpy as np

rows = jnp.stack((jnp.arange(32_769.0), jnp.zeros(32_769), jnp.zeros(32_769)), axis=1)
square = jax.jit(jax.vmap(lambda row: jnp.sum((jnp.eye(3) @ row) ** 2)))
np.testing.assert_allclose(square(rows), np.arange(32_769.0) ** 2, rtol=1e-6)
x = jnp.ones((3, 1, 2, 2, 8, 8, 8))
np.testing.assert_array_equal(jax.jit(lambda a, b: jnp.sum(a * b, axis=3))(x, x), np.full((3, 1, 2, 8, 8, 8), 2))
print("right")
"""


def run(*words: str, **flags: str) -> subprocess.CompletedProcess:
    """Runs Python as a user would, without the flags of tests/conftest.py, which change what XLA fuses."""
    environment = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"} | flags
    environment |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT)}
    return subprocess.run([sys.executable, *words], env=environment, capture_output=True, text=True, timeout=600)


@pytest.mark.multiprocess
def test_programs_of_a_faulty_release_are_right_with_legacy():
    assert run("-c", f"import shardformer.legacy\nshardformer.legacy.install()\n{PROGRAM}").stdout == "right\n"


@pytest.mark.multiprocess
def test_programs_of_a_faulty_release_are_right_under_legacy(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(PROGRAM)
    assert run("-m", "shardformer", "legacy", str(script)).stdout == "right\n"


@pytest.mark.multiprocess
@pytest.mark.skipif(not IS_FAULTY, reason="this release compiles the programs correctly")
def test_programs_of_a_faulty_release_are_wrong_without_the_flag():
    """The twin."""
    done = run(
        "-c",
        f"import shardformer.legacy\nshardformer.legacy.install()\n{PROGRAM}",
        XLA_FLAGS="--xla_cpu_experimental_ynn_fusion_type=dot",
    )
    assert done.returncode != 0
    assert run("-c", PROGRAM).returncode != 0


def install(monkeypatch, version: str) -> None:
    """Makes every package have this version."""
    monkeypatch.setattr(jax_releases, "find_version", lambda package: version)


@pytest.mark.parametrize(
    ("version", "before", "after"),
    [
        ("0.10.1", "", ""),
        ("0.10.2", "", "--xla_cpu_experimental_ynn_fusion_type="),
        ("0.11.0", "--a=1", "--a=1 --xla_cpu_experimental_ynn_fusion_type="),
        ("0.10.2", "--xla_cpu_experimental_ynn_fusion_type=", "--xla_cpu_experimental_ynn_fusion_type="),
        ("0.12.0.1", "", ""),
    ],
)
def test_only_faulty_releases_leave_out_fusions(monkeypatch, version, before, after):
    monkeypatch.setenv("XLA_FLAGS", before)
    install(monkeypatch, version)
    jax_releases.avoid_faulty_fusions()
    assert os.environ["XLA_FLAGS"] == after


def test_oldest_release_is_that_of_the_package():
    asked = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    assert f"jax>={'.'.join(map(str, jax_releases.OLDEST))}" in asked
    oldest = (ROOT / ".github/workflows/oldest.txt").read_text()
    assert re.search(rf"^jax=={'.'.join(map(str, jax_releases.OLDEST))}\.0$", oldest, re.MULTILINE)


def test_release_that_is_too_old_is_rejected_by_commands(monkeypatch, capsys):
    install(monkeypatch, "0.9.2")
    with pytest.raises(UsageError):
        jax_releases.check()
    assert main(["train", "tiny"]) == 2
    assert capsys.readouterr().err == (
        "shardformer: error: jax 0.9.2 is installed; shardformer needs jax>=0.10: pip install -U jax\n"
    )


@pytest.mark.parametrize(
    ("version", "flags", "named"),
    [
        ("0.10.2", "", "jax#39103"),
        ("0.10.2", "--xla_cpu_experimental_ynn_fusion_type=", ""),
        ("0.11.0", "", "jax#39103"),
        ("0.11.1", "", "jax#40101"),
        ("0.12.0.1", "", ""),
        ("", "", ""),
    ],
)
def test_faults_of_a_release_are_named(monkeypatch, version, flags, named):
    install(monkeypatch, version)
    monkeypatch.setenv("XLA_FLAGS", flags)
    line = jax_releases.describe_faults()
    assert named in line
    assert bool(line) == bool(named)


@pytest.mark.parametrize(("platform", "is_command", "count"), [("cpu", False, 1), ("cpu", True, 0), ("tpu", False, 0)])
def test_programs_of_users_are_warned_of_a_cpu(monkeypatch, platform, is_command, count, said):
    install(monkeypatch, "0.10.2")
    monkeypatch.setenv("XLA_FLAGS", "")
    monkeypatch.setattr(jax, "default_backend", lambda: platform)
    monkeypatch.setattr(command_start, "_is_command", is_command)
    session.warn_of_compiler()
    assert ["jax#39103" in line for line in said] == [True] * count


def test_version_names_the_faults(monkeypatch, capsys):
    install(monkeypatch, "0.11.1")
    assert main(["--version"]) == 0
    assert "jax#40101" in capsys.readouterr().out
