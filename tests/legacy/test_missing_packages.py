"""A package that a script imports and that is not installed is named, with the line that installs it."""

import importlib.util
import warnings
from importlib.machinery import ModuleSpec

import jax
import pytest

from shardformer.__main__ import main
from shardformer.legacy import array_members, missing_packages, script
from shardformer.legacy.lost_names import FLAX_MODELS
from shardformer.legacy.missing_packages import PACKAGES, REMARKS, missing_imports

SOURCE = "import os, ray\nfrom google.cloud import storage\nfrom smart_open import open\nfrom . import wandb\n"


@pytest.fixture
def nothing_installed(monkeypatch):
    def find(name):
        if "." in name:
            raise ModuleNotFoundError(name)

    monkeypatch.setattr(importlib.util, "find_spec", find)


def test_imports_of_missing_packages_are_found(nothing_installed):
    assert list(missing_imports(SOURCE)) == [(1, "ray"), (2, "google.cloud"), (3, "smart_open")]


def test_an_installed_package_is_not_listed(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: ModuleSpec(name, None, origin="a file"))
    assert not list(missing_imports(SOURCE))


def test_check_names_each_package_once_and_passes(nothing_installed, tmp_path, capsys):
    for name in ("a.py", "b.py"):
        (tmp_path / name).write_text(SOURCE)
    assert main(["legacy", "--check", str(tmp_path)]) == 0
    lines = [line.split("  ") for line in capsys.readouterr().out.splitlines()]
    listed = {words[1].strip(): words[-1].strip() for words in lines if str(tmp_path / "a.py") in words[0]}
    assert sorted(listed) == ["google.cloud", "ray", "smart_open"]
    assert listed["ray"].startswith("pip install ray (without it, ")
    assert not any("b.py" in words[0] for words in lines)


@pytest.mark.parametrize(
    ("name", "note"),
    [
        ("wandb", "wandb is not installed: pip install wandb (without it, nothing is logged)"),
        ("func_timeout", "func_timeout is not installed: pip install func_timeout"),
        ("transformers.modeling_flax_utils", f"transformers.modeling_flax_utils is not installed: {FLAX_MODELS}"),
        ("their_own_module", None),
    ],
)
def test_error_says_how_to_install(name, note):
    error = ModuleNotFoundError(f"No module named {name!r}", name=name)
    array_members.advise(error)
    assert getattr(error, "__notes__", [None])[-1] == note


def test_error_about_a_flax_model_says_what_has_it():
    for name, advised in (("FlaxGPT2Model", True), ("GPT2Model", False)):
        error = ImportError(f"cannot import name {name!r} from 'transformers'")
        array_members.advise(error)
        assert hasattr(error, "__notes__") == advised


def test_remarks_are_about_packages_of_the_table():
    assert set(REMARKS) <= set(PACKAGES)
    assert not missing_packages.advice("jax")


def test_a_launch_ignores_what_unedited_code_cannot_change():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script._ignore_warnings()
        warnings.warn("jax.process_count has been renamed to jax.process_count. It will go.", stacklevel=1)
        assert not caught
        warnings.warn("jax.process_count is slow", stacklevel=1)
    assert [str(each.message) for each in caught] == ["jax.process_count is slow"]
    assert jax.process_count() == 1
