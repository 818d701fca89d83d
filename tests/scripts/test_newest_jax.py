"""scripts/newest_jax.sh with stand-ins for Python and pyenv: the Python that it chooses, and what it runs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Prints its version if asked; as `-m venv FOLDER` puts itself there. Whatever else it is asked to run goes into a log.
PYTHON = """#!/bin/bash
case "$*" in
    *sys.version_info*) echo {version} ;;
    "-c import venv"*) exit {without_venv} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-c "*) echo JAX ;;
    *) echo "{version}" "$@" >>"{log}" ;;
esac
"""
SHIM = "#!/bin/sh\necho 'pyenv: command not found' >&2\nexit 127\n"


def write_command(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)


@pytest.fixture
def install_python(tmp_path):
    """Returns a function that puts a stand-in for Python into a folder."""

    def install(version, path, without_venv=0):
        text = PYTHON.format(version=version, without_venv=without_venv, log=tmp_path / "log")
        write_command(tmp_path / path, text)

    install("3.11", "bin/python3")
    write_command(tmp_path / "bin" / "python3.13", SHIM)
    write_command(tmp_path / "bin" / "python3.12", SHIM)
    write_command(tmp_path / "bin" / "pyenv", f'#!/bin/sh\necho "{tmp_path}/pyenv"\n')
    return install


def run_script(folder, *words):
    environment = os.environ | {"PATH": f"{folder}/bin:/usr/bin:/bin", "TMPDIR": str(folder)}
    done = subprocess.run(
        ["bash", "scripts/newest_jax.sh", *words],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    log = folder / "log"
    return done, log.read_text().splitlines() if log.exists() else []


def test_newest_python_of_pyenv_runs_the_tests(tmp_path, install_python):
    install_python("3.12", "pyenv/versions/3.12.1/bin/python")
    install_python("3.13", "pyenv/versions/3.13.0/bin/python")
    done, commands = run_script(tmp_path, "tests/legacy/test_xmap.py")
    assert done.returncode == 0, done.stderr
    assert [line.split()[:3] for line in commands] == [["3.13", "-m", "pip"], ["3.13", "-m", "pytest"]]
    assert commands[1].endswith(" tests/legacy/test_xmap.py")
    assert not list(tmp_path.glob("tmp.*")), "the environment is still there"


def test_python_without_venv_is_passed_over(tmp_path, install_python):
    install_python("3.13", "bin/python3.13", without_venv=1)
    install_python("3.12", "bin/python3.12")
    assert run_script(tmp_path)[1][0].startswith("3.12 ")


def test_leg_without_a_python_is_reported(tmp_path, install_python):
    done, commands = run_script(tmp_path)
    assert (done.returncode, commands) == (0, [])
    assert done.stderr.startswith("LEFT OUT: the legacy tests on the newest JAX.")
