"""Code of flax 0.6, whose init returned FrozenDicts: listed, rewritten, and run with FLAX_RETURN_FROZENDICT."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer.legacy.frozen_dicts import VARIABLE, sign_of_old_flax
from shardformer.legacy.removed_uses import find_removed_uses
from tests.legacy.migrated_code import migrated

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "source",
    [
        "params = model.init(key, x).unfreeze()",
        "params = model.init(key, x)['params'].unfreeze()",
        "variables = model.init(key, x)\nparams = variables['params'].unfreeze()",
        "params = jax.jit(model.init)(key, x).unfreeze()",
    ],
)
def test_unfreeze_of_initial_variables_is_rewritten(tmp_path, source):
    assert [(use.name, use.status) for use in find_removed_uses(source)] == [("init(...).unfreeze()", "covered")]
    found = migrated(tmp_path, source)
    assert ".unfreeze()" not in found.migrated
    assert "import flax.core\n" in found.migrated
    assert "= flax.core.unfreeze(" in found.migrated
    assert found.undecided == []


@pytest.mark.parametrize(
    "source", ["hyperparams.clone().unfreeze()", "flax.core.unfreeze(model.init(x))", "freeze(x).unfreeze()"]
)
def test_other_unfreeze_stays(tmp_path, source):
    assert find_removed_uses(source) == []
    assert migrated(tmp_path, source).migrated == source


@pytest.mark.parametrize(
    ("name", "text", "sign"),
    [
        ("requirements.txt", "jax\nflax==0.6.1\n", "requirements.txt has flax==0.6"),
        ("setup.cfg", "install_requires =\n    flax<0.7\n", "setup.cfg has flax<0.7"),
        ("setup.py", "setup(install_requires=[\n  'flax~=0.5.2',\n])", "setup.py has flax~=0.5"),
        ("requirements.txt", "flax>=0.3.6\n", ""),
        ("requirements.txt", "flax==0.8.4\n", ""),
        ("requirements.txt", "not-flax==0.6.1\n", ""),
        ("library/model.py", "import flax\np = m.init(k).unfreeze()\n", "library/model.py:2 calls unfreeze"),
        ("library/model.py", "p = m.unfreeze()\n", ""),
    ],
)
def test_signs_of_old_flax(tmp_path, name, text, sign):
    (tmp_path / ".git").mkdir()
    (tmp_path / "library").mkdir()
    (tmp_path / name).write_text(text)
    (tmp_path / "scripts").mkdir()
    script = tmp_path / "scripts" / "train.py"
    script.write_text("")
    assert sign_of_old_flax(script) == sign


def launch(folder, **environment):
    (folder / "train.py").write_text(f"import os\nprint(os.environ.get('{VARIABLE}'))\n{{}}.unfreeze()\n")
    return subprocess.run(
        [sys.executable, "-m", "shardformer", "legacy", "train.py"], cwd=folder, text=True, capture_output=True,
        env=os.environ | {"PYTHONPATH": str(ROOT)} | environment, timeout=600,
    )  # fmt: skip


def test_launcher_keeps_frozen_dicts_of_an_old_project(tmp_path):
    (tmp_path / "requirements.txt").write_text("flax==0.6.1\n")
    done = launch(tmp_path)
    assert done.stdout == "true\n"
    assert f"shardformer.legacy: {VARIABLE}=true, because requirements.txt has flax==0.6\n" in done.stderr
    assert launch(tmp_path, **{VARIABLE: "false"}).stdout == "false\n"


def test_error_about_a_dict_names_the_variable(tmp_path):
    done = launch(tmp_path)
    assert done.stdout == "None\n"
    assert done.returncode == 1
    assert f"flax: since 0.7 init returns dicts; set {VARIABLE}=true" in done.stderr
