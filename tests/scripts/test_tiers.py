"""scripts/test.sh with stand-ins for Python and pyenv: the Python that each tier chooses, and what it runs."""

import os
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Prints its version if asked; as `-m venv FOLDER` puts itself there. Whatever else it is asked to run goes into a log,
# and the environment of pytest beside it.
PYTHON = """#!/bin/bash
case "$*" in
    *"sys.exit("*) ;;
    *sys.version_info*) echo {version} ;;
    "-c import venv"*) exit {without_venv} ;;
    "-m venv "*) mkdir -p "$3/bin" && cp "$0" "$3/bin/python" ;;
    "-c "*) echo JAX ;;
    "-m pytest"*) echo "{version}" "$@" >>"{log}"; env >"{log}".environment ;;
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
    """Returns the finished script, and {what pytest runs: the version of its Python}."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "JAX_"))}
    environment |= {"PATH": f"{folder}/bin:/usr/bin:/bin", "VENV": f"{folder}/venv"}
    command = ["bash", "scripts/test.sh", *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in (folder / "log").read_text().splitlines()]
    return done, {line[-1]: line[0] for line in lines if line[1:3] == ["-m", "pytest"]}


# The last words of the commands: of every test, of those that are "not nightly", of the short tier.
ALL, FULL, SHORT, LIBTPU = "--no-loadscope-reorder", "nightly", "--short", "tests/analysis/test_ahead_of_time.py"


def test_full_tier_runs_on_the_newest_python_of_pyenv(tmp_path, install_python):
    install_python("3.12", "pyenv/versions/3.12.1/bin/python")
    install_python("3.13", "pyenv/versions/3.13.0/bin/python")
    assert run_script(tmp_path, "full")[1] == {FULL: "3.13", LIBTPU: "3.11"}


def test_night_leaves_out_no_test(tmp_path, install_python):
    install_python("3.13", "pyenv/versions/3.13.0/bin/python")
    assert run_script(tmp_path, "night")[1] == {ALL: "3.13", LIBTPU: "3.11"}


def test_short_tier_runs_on_the_default_python(tmp_path, install_python):
    install_python("3.13", "pyenv/versions/3.13.0/bin/python")
    assert run_script(tmp_path)[1] == {SHORT: "3.11"}


def read_flags(folder):
    lines = (folder / "log.environment").read_text().splitlines()
    return {line for line in lines if line.startswith(("JAX_", "PYTHONWARNINGS="))} - {"JAX_PLATFORMS=cpu"}


def test_next_tier_gives_the_planned_defaults_to_processes(tmp_path, install_python):
    install_python("3.13", "pyenv/versions/3.13.0/bin/python")
    assert run_script(tmp_path, "next")[1] == {SHORT: "3.13"}
    planned = {"JAX_REMAT3=1", "JAX_CUSTOM_VJP3=1", "JAX_LEGACY_PRNG_KEY=error", "JAX_DISALLOW_MESH_CONTEXT_MANAGER=1"}
    assert read_flags(tmp_path) == planned | {"PYTHONWARNINGS=error::DeprecationWarning"}


def test_short_tier_has_the_defaults_of_the_installed_jax(tmp_path, install_python):
    run_script(tmp_path)
    assert read_flags(tmp_path) == set()


def test_python_without_venv_is_passed_over(tmp_path, install_python):
    install_python("3.13", "bin/python3.13", without_venv=1)
    install_python("3.12", "bin/python3.12")
    assert run_script(tmp_path, "full")[1][FULL] == "3.12"


def test_default_python_that_is_the_newest_keeps_its_environment(tmp_path, install_python):
    install_python("3.13", "bin/python3")
    assert run_script(tmp_path, "full")[1] == {FULL: "3.13", LIBTPU: "3.13"}
    assert not (tmp_path / "venv-newest").exists()


def test_missing_newest_python_is_reported(tmp_path, install_python):
    done, runs = run_script(tmp_path, "full")
    assert runs == {FULL: "3.11", LIBTPU: "3.11"}
    assert "LEFT OUT: the newest JAX." in done.stderr
