"""The entry: help, the version, output that cannot be written, interrupts, and where it is run from."""

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import jax
import pytest

import shardformer
from shardformer import __main__
from shardformer.__main__ import main
from shardformer.cli import commands, show_command
from shardformer.config import format_value, parsing
from tests.runs import USAGE
from tests.surroundings import let_fail, note_exits

ROOT = Path(__file__).parents[1]


def test_help_and_no_command(capsys):
    for words, status in ([], 2), (["--help"], 0), (["help"], 0):
        assert main(words) == status
        said = capsys.readouterr().out
        assert said.startswith("usage: python -m shardformer COMMAND")
        missing = [name for name in commands.COMMANDS if f"  {name} " not in said]
        assert not missing, "add them to GROUPS of cli/commands.py"


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_each_command_names_its_function(name):
    assert callable(commands.load(commands.COMMANDS[name].function))


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_with_a_name_is_the_page_of_that_command(name, capsys):
    assert main([name, "--help"]) == 0
    page = capsys.readouterr().out
    assert main(["help", name]) == 0
    assert capsys.readouterr().out == page


def test_unexpanded_tilde_is_the_home_folder(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    given = mock.Mock(return_value=0)
    monkeypatch.setattr(__main__, "_load", lambda command: given)
    run = f"{tmp_path}/run"
    for words, expected in (
        (["train", "--resume", "~/run"], ["--resume", run]),
        (["train", "--resume=~/run", "steps=9"], [f"--resume={run}", "steps=9"]),
        (["plot", "~/run", "other"], [run, "other"]),
        (["sample", "~/run", "prompt=~/x"], [run, "prompt=~/x"]),
        (["legacy", "script.py", "~/run"], ["script.py", "~/run"]),
    ):
        assert main(words) == 0
        given.assert_called_with(expected)


@pytest.mark.parametrize("name", commands.COMMANDS)
def test_help_page_lists_every_key_default_and_meaning(name, capsys):
    assert main([name, "--help"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: python -m shardformer {name} ")
    for place in commands.COMMANDS[name].options:
        for name, field in parsing.keys_of(commands.load(place)).items():
            assert f"\n  {name}={format_value(field, field.default)}" in said
            assert field.metadata["meaning"] in " ".join(said.split())
    assert max(map(len, said.splitlines())) <= 120


def test_version_is_that_of_the_package(capsys):
    assert main(["--version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith(f"shardformer {shardformer.__version__} (jax {jax.__version__}, ")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["project"]["dynamic"] == ["version"]
    assert project["tool"]["setuptools"]["dynamic"]["version"] == {"attr": "shardformer.__version__"}


def test_character_outside_the_encoding_is_escaped(tmp_path):
    code = "from shardformer.__main__ import main; main(['--version']); print('\U0001f600')"
    environment = os.environ | {"PYTHONPATH": str(ROOT), "PYTHONIOENCODING": "latin-1"}
    assert subprocess.check_output([sys.executable, "-c", code], env=environment).endswith(b"\\U0001f600\n")


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ("--help > /dev/full", 1, "shardformer: failed: [Errno 28] No space left on device\n"),
        ("--help > /dev/full 2>&1", 1, ""),
        ("nothing 2> /dev/full", 2, ""),
        ("--help >&-", 0, ""),
        ("--help >&- 2>&- <&-", 0, ""),
    ],
)
def test_unwritable_output_keeps_the_exit_status(words, status, said):
    """Python's own end would write once more, fail, and make 120 of any exit status."""
    command = ["bash", "-c", f"{sys.executable} -m shardformer {words}"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (status, "", said)


def test_help_in_a_narrow_terminal(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "20")
    assert main(["train", "--help"]) == 0
    assert "peak learning rate" in capsys.readouterr().out


def test_message_keeps_the_lines_of_a_list():
    assert __main__._escape("a\nb:\n  - one\r\n  - two") == "a\\nb:\n  - one\\r\n  - two"
    assert __main__._escape("x" * 9999) == "x" * 1500 + "... (9,999 in all)"


@pytest.mark.parametrize("words", [["show", "tiny"], ["train", "--help"], ["--version"]])
def test_python_without_docstrings_is_rejected(words):
    command = [sys.executable, "-OO", "-m", "shardformer", *words]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (ended.returncode, ended.stdout) == (USAGE, "")
    assert ended.stderr.startswith("shardformer: error: python -OO removes docstrings")
    assert ended.stderr.count("\n") == 1


def test_tight_address_space_is_rejected():
    command = ["bash", "-c", f"ulimit -v 3000000; {sys.executable} -m shardformer show tiny"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert ended.returncode == USAGE
    assert ended.stderr.startswith("shardformer: error: ulimit -v allows 3.07 GB of address space, and JAX")
    assert ended.stderr.count("\n") == 1


@pytest.mark.multiprocess
def test_missing_devices_are_named(tmp_path):
    command = [sys.executable, "-m", "shardformer", "train", "tiny", "data=builtin", f"out={tmp_path}/run"]
    environment = os.environ | {"JAX_PLATFORMS": "cuda", "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert ended.returncode == USAGE
    assert ended.stderr.startswith("shardformer: error: JAX cannot use the devices that JAX_PLATFORMS=cuda asks for")
    assert ended.stderr.count("\n") == 1


@pytest.mark.multiprocess
def test_package_wins_over_a_clone_of_the_same_name(tmp_path):
    """There, `shardformer` names the clone's folder too; an editable install must be a plain path to win."""
    (tmp_path / "shardformer").symlink_to(ROOT)
    command = [sys.executable, "-m", "shardformer", "show", "tiny"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (0, "")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    assert project["tool"]["setuptools"]["package-dir"] == {"": "."}


SWALLOWS = """
import signal, sys, types
from shardformer import __main__

class Commands(types.ModuleType):
    def __init__(self):
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            pass  # as where a callback of the garbage collector was running

class Finder:
    def find_spec(self, name, path, target=None):
        if name == "shardformer.cli.show_command":
            Commands()

sys.meta_path.insert(0, Finder())
__main__.main(["show", "tiny"])
"""


def test_ctrl_c_during_the_imports_ends_the_process():
    ended = subprocess.run([sys.executable, "-c", SWALLOWS], capture_output=True, text=True)
    assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "shardformer: interrupted\n")


def test_ctrl_c_during_a_command_ends_the_process(monkeypatch, capsys):
    def end(status):
        raise SystemExit(status)

    note_exits(monkeypatch, end)
    let_fail(monkeypatch, show_command, "show", KeyboardInterrupt())
    with pytest.raises(SystemExit, match="1"):
        main(["show", "tiny"])
    assert capsys.readouterr().err == "shardformer: interrupted\n"
