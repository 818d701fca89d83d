"""`serve` in an environment without its extra: the help, and the advice to install it."""

import importlib.util
import sys

import pytest

from shardformer.__main__ import main
from shardformer.cli.help import format_command

OWN = ("shardformer.cli.serve", "shardformer.inference.serve.")


@pytest.fixture
def without_extra(monkeypatch):
    """Hides starlette and uvicorn from modules that are imported from now on."""
    find = importlib.util.find_spec
    hidden = ("starlette", "uvicorn")
    for name in [name for name in sys.modules if name.startswith((*hidden, *OWN))]:
        parent, _, child = name.rpartition(".")
        if parent:  # whose attribute is the module: the undoing of this puts it back
            monkeypatch.setattr(sys.modules[parent], child, sys.modules[name], raising=False)
    for name in [name for name in sys.modules if name.startswith((*hidden, *OWN))]:
        monkeypatch.delitem(sys.modules, name)
    for name in hidden:
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name in hidden else find(name, *rest))


def test_help_needs_no_extra(without_extra):
    assert "port=8000" in format_command("serve")


def test_missing_extra_is_named_with_the_fix(without_extra, capsys):
    assert main(["serve", "checkpoints/no_such_run"]) == 2
    assert "serve needs the package starlette; install it: pip install 'shardformer[serve]'" in capsys.readouterr().err


def test_hidden_package_cannot_be_imported(without_extra):
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("shardformer.inference.serve.app")
