"""`python -m shardformer legacy SCRIPT.py`: the unedited script runs as it does under `python`, with its names back."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardformer.__main__ import main
from shardformer.legacy import install, settings, uninstall

ROOT = Path(__file__).parents[2]
SCRIPT = """\
import sys
import jax, helper
from jax.experimental.maps import xmap

def fail():
    raise RuntimeError("RESOURCE_EXHAUSTED: the script's own")

if __name__ == "__main__":
    print(sys.argv[1:], helper.VALUE, jax.tree_map(abs, [-1]), xmap.__name__, __file__ == sys.argv[0])
    action = sys.argv[1] if len(sys.argv) > 1 else ""
    if action == "fail": fail()
    if action == "missing": import no_such_module
    if action == "open": open("no such file")
    if action.isdigit(): sys.exit(int(action))
    if action == "message": sys.exit("a last word")
"""


@pytest.fixture
def script(tmp_path):
    folder = tmp_path / "theirs"
    folder.mkdir()
    (folder / "helper.py").write_text("VALUE = 'beside it'\n")
    (folder / "script.py").write_text(SCRIPT)
    yield str(folder / "script.py")
    sys.modules.pop("helper", None)
    uninstall()


def run(*words: str) -> int | str | None:
    try:
        return main(["legacy", *words])
    except SystemExit as end:
        return end.code


def test_as_a_command_of_its_own(script, tmp_path):
    command = [sys.executable, "-m", "shardformer", "legacy", script, "--help", "x=1"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "['--help', 'x=1'] beside it [1] xmap True\n")
    assert done.stderr == f"{install()}\n"


def test_what_it_sees_and_what_it_leaves(script, capsys):
    before = sys.argv, sys.path[:]
    assert run(script, "--check", "--strict") == 0
    assert capsys.readouterr().out == "['--check', '--strict'] beside it [1] xmap True\n"
    assert (sys.argv, sys.path) == before
    assert not settings.strict


@pytest.mark.parametrize(("action", "status"), [("0", 0), ("7", 7), ("message", "a last word")])
def test_it_exits_as_it_likes(script, action, status):
    assert run(script, action) == status


@pytest.mark.parametrize(
    ("action", "last"),
    [
        ("fail", "RuntimeError: RESOURCE_EXHAUSTED: the script's own"),
        ("missing", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("open", "FileNotFoundError: [Errno 2] No such file or directory: 'no such file'"),
    ],
)
def test_its_mistakes_are_its_own(script, capsys, action, last):
    assert run(script, action) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[1] == "Traceback (most recent call last):"
    assert error[2].startswith(f'  File "{script}", line ')
    assert error[-1] == last
    assert not any("runpy" in line or "shardformer/legacy" in line for line in error[1:])


def test_a_script_that_does_not_parse(script, capsys):
    Path(script).write_text("print 'python 2'\n")
    assert run(script) == 1
    error = capsys.readouterr().err.splitlines()
    assert error[1] == f'  File "{script}", line 1'
    assert error[-1].startswith("SyntaxError: Missing parentheses")


@pytest.mark.parametrize(
    ("flags", "strict", "partitionable"),
    [
        ([], False, True),
        (["--strict"], True, True),
        (["--legacy-random"], False, False),
        (["--legacy-random", "--strict"], True, False),
    ],
)
def test_options(script, flags, strict, partitionable):
    assert run(*flags, script) == 0
    assert (settings.strict, jax.config.jax_threefry_partitionable) == (strict, partitionable)


def test_nothing_is_installed_before_the_script_is_found(capsys):
    assert run("nowhere.py") == 2
    assert capsys.readouterr().err == "shardformer: error: nowhere.py: there is no such script to run\n"
    assert not hasattr(jax, "tree_map")


@pytest.mark.parametrize("words", [[], ["--check"], ["--stric", "a.py"], ["--strict"], ["--strict", "--check", "a.py"]])
def test_wrong_words(capsys, words):
    assert run(*words) == 2
    error = capsys.readouterr().err
    expected = "legacy takes [--strict] [--legacy-random] SCRIPT.py ..., or --check PATH ...; got "
    assert error == f"shardformer: error: {expected}{' '.join(words) or 'nothing'}\n"


def test_help_is_ours_before_the_script_and_its_own_after(script, capsys):
    assert run("--help") == 0
    assert "legacy --check PATH" in capsys.readouterr().out
    assert run("--strict", "-h", script) == 0
    assert capsys.readouterr().out.startswith("usage: ")
    assert run(script, "-h") == 0
    assert capsys.readouterr().out.startswith("['-h']")
