"""`legacy --check`: removed names are found through any alias, in any file, and nothing is run to find them."""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from shardformer.__main__ import main
from shardformer.legacy import installed_libraries, removed_names
from shardformer.legacy.check_source import UNSEEN
from shardformer.legacy.removed_library_names import LIBRARY_NAMES
from shardformer.legacy.removed_uses import find_removed_uses

MAPS = "jax.experimental.maps"
ROOT = Path(__file__).parents[2]


def notebook(*sources):
    cells = [{"cell_type": "markdown", "source": "!"}] + [{"cell_type": "code", "source": s} for s in sources]
    return json.dumps({"nbformat": 4, "cells": cells}).encode()


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jax\njax.tree_map(f, x)", [(2, "jax.tree_map")]),
        ("import jax as j\nj.tree_map", [(2, "jax.tree_map")]),
        ("from jax import tree_map\ntree_map(f, x)", [(1, "jax.tree_map")]),
        ("from jax import tree_map as tm, jit", [(1, "jax.tree_map")]),
        ("import jax.numpy as jnp\njnp.DeviceArray", [(2, "jax.numpy.DeviceArray")]),
        ("from jax import numpy as jnp\njnp.trapz(jnp.sin(x))", [(2, "jax.numpy.trapz")]),
        (f"import {MAPS} as maps\nmaps.xmap(f)", [(1, MAPS), (2, f"{MAPS}.xmap")]),
        (f"import {MAPS}\n\n{MAPS}.xmap(f)", [(1, MAPS), (3, f"{MAPS}.xmap")]),
        ("from jax.experimental import maps as m\nm.mesh(d, n)", [(1, MAPS), (2, f"{MAPS}.mesh")]),
        (f"import jax\n{MAPS}.xmap(f)", [(2, f"{MAPS}.xmap")]),
        (f"from {MAPS} import *", [(1, MAPS)]),
        (f"from {MAPS} import thread_resources\nthread_resources.env.shape", [(1, f"{MAPS}.thread_resources")]),
        (f"def f():\n  import {MAPS} as maps\n  def g(): return maps.mesh", [(2, MAPS), (3, f"{MAPS}.mesh")]),
        (f"from {MAPS} import soft_pmap", [(1, f"{MAPS}.soft_pmap")]),
        (f"import jax\n{MAPS}.EMPTY_ENV.shape", [(2, f"{MAPS}.EMPTY_ENV")]),
        ("import jax\nf(jax.ops.index[0], jax.ops.index_add)", [(2, "jax.ops.index"), (2, "jax.ops.index_add")]),
        ("from jax.config import config\nconfig.update('jax_enable_x64', 1)", [(1, "jax.config.config")]),
        ("from jax.config import config\nconfig.FLAGS.a", [(1, "jax.config.config"), (2, "jax.config.FLAGS")]),
        ("import jax.config\njax.config.update('jax_enable_x64', 1)", [(1, "jax.config")]),
        ("from jax.experimental import host_callback as hcb\nhcb.id_tap", [(1, "jax.experimental.host_callback")]),
        ("import jax\njax.experimental.host_callback.call(f)", [(2, "jax.experimental.host_callback")]),
        ("from jax.experimental import optimizers\noptimizers.adam(1)", [(1, "jax.experimental.optimizers")]),
        ("import optax\nclass S(optax.OptState): pass", [(2, "optax.OptState")]),
        ("import jax\nf(jax.tree_leaves())[jax.tree_flatten()].x", [(2, "jax.tree_flatten"), (2, "jax.tree_leaves")]),
        ("import jax\nx.jax.tree_map\njax.tree_util.tree_map\njax.config.update('jax_enable_x64', 1)", []),
        ("from jax import config\nconfig.update('jax_enable_x64', 1)", []),
        ("from . import jax\nfrom .jax import tree_map", []),
        ("import torch as jax\njax.tree_map", []),
        ("import optax\noptax.big = type('', (), {})()\noptax.big.f = g\nh(optax.big.f)", []),
        ("import jax\njax.config.jax_array = True", [(2, "jax.config.jax_array")]),
        ("import jax\nf(jax.tree_map, jax.tree_map)", [(2, "jax.tree_map")]),
        ("from transformers import FlaxGPT2Model, GPT2Config", [(1, "transformers.FlaxGPT2Model")]),
        ("import transformers\ntransformers.modeling_flax_utils.ACT2FN['gelu']",
         [(2, "transformers.modeling_flax_utils")]),
        ("from transformers.models.bart.modeling_flax_bart import shift_tokens_right",
         [(1, "transformers.models.bart.modeling_flax_bart")]),
        ("from jax._src.util import prod, safe_map", [(1, "jax._src.util.prod")]),
        ("from jax.interpreters.xla import Device", [(1, "jax.interpreters.xla.Device")]),
        ("from jax import test_util as jtu\njtu.cases_from_list(x)\njtu.default_tolerance()\njtu.check_grads",
         [(2, "jax.test_util.cases_from_list"), (3, "jax.test_util.default_tolerance")]),
        ("'jax.tree_map'  # jax.tree_map", []),
        ("tree_map = 1\ntree_map", []),
        ("from optax import adam\nimport optax.contrib", []),
        ("import jax\njax.xla.DeviceArray\njax.xla.nothing\njax.xla.Backend",
         [(2, "jax.interpreters.xla.DeviceArray"), (3, "jax.interpreters.xla.nothing"), (4, "jax.xla")]),
        ("import jax\njax.tools.nothing.x", [(2, "jax.tools.nothing")]),
        ("from jax import core\ncore.Tracer\ncore.nothing.x", [(3, "jax.core.nothing")]),
        ("from jax.no_such import thing\nthing.x", [(1, "jax.no_such")]),
        ("from optax import nothing", [(1, "optax.nothing")]),
        ("import haiku as hk\nhk.Linear.nothing\nhk.nothing", [(3, "haiku.nothing")]),
        ("import jax\njax.config.update('jax_array', True)\njax.config.update('jax_nothing', 1)",
         [(2, 'jax.config.update("jax_array")'), (3, 'jax.config.update("jax_nothing")')]),
        ("from jax.config import config\nconfig.omnistaging_enabled\nconfig.FLAGS.jax_xla_backend = 'tpu_driver'",
         [(1, "jax.config.config"), (2, "jax.config.omnistaging_enabled"), (3, "jax.config.FLAGS")]),
        ("import jax.numpy as jnp\njnp.clip(x, a_min=0)\njnp.clip(x, 0)\nnp.clip(x, a_min=0)",
         [(2, "jax.numpy.clip(a_min=)")]),
        ("from jax import pure_callback as call\ncall(f, s, x, vectorized=True)",
         [(2, "jax.pure_callback(vectorized=)")]),
        ("x.sharding_spec\nx.to_py()", [(1, "x.sharding_spec"), (2, "x.to_py")]),
        ("f(x).device().platform\nx.device\nx.device_buffer", [(1, "x.device()"), (3, "x.device_buffer")]),
        ("import jax\ndef f(jax): return jax.tree_map", []),
        ("import jax\ng = lambda jax: jax.tree_map\n[jax.tree_map for jax in x]", []),
        ("import jax\ndef f(x=jax.tree_map):\n  jax = 1\n  return jax.tree_leaves", [(2, "jax.tree_map")]),
        ("def f():\n  import jax\n  jax.tree_map\ndef g(): jax.tree_map", [(3, "jax.tree_map")]),
        ("try:\n  import jax\nexcept ImportError:\n  jax = None\njax.tree_map", [(5, "jax.tree_map")]),
        ("from jax.experimental import host_callback as hcb\nhcb.call\nhcb.nothing",
         [(1, "jax.experimental.host_callback"), (3, "jax.experimental.host_callback.nothing")]),
        ("from functools import partial\nimport jax\n@partial(jax.jit, abstracted_axes=a)\ndef f(x): pass",
         [(3, "jax.jit(abstracted_axes=)")]),
        ("import jax.numpy as jnp\njnp.save(f, x, fix_imports=True)", [(2, "jax.numpy.save(fix_imports=)")]),
        ("import haiku as hk\nhk.cond(p, f, g, x, linear=1)", [(2, "haiku.cond(linear=)")]),
        ("import jax\njax.host_id(), jax.host_count(), jax.host_ids()", []),
        ("import optax\noptax.chain(optax.dpsgd())\ndef f(s: optax.OptState): pass", []),
        ("from jax.experimental.pjit import pjit\npjit(f, in_axis_resources=None)",
         [(2, "jax.experimental.pjit.pjit(in_axis_resources=)")]),
        ("import numpy as np\ndef f(x: np.nothing):\n  y: np.no_type = x\nz: np.nothing = 1",
         [(2, "numpy.nothing"), (4, "numpy.nothing")]),
        ("from __future__ import annotations\nimport numpy as np\ndef f(x: np.nothing) -> np.other:\n  np.third\n"
         "class C:\n  z: np.nothing = np.fourth", [(4, "numpy.third"), (6, "numpy.fourth")]),
        ("from __future__ import annotations\nimport jax\ndef f(x: jax.xla.DeviceArray): pass",
         [(3, "jax.interpreters.xla.DeviceArray")]),
        ("import jax\njax.Array.nothing\njax.config.nothing\nimport torch\ntorch.nothing", []),
    ],
)  # fmt: skip
def test_aliases_are_followed(source, expected):
    assert [use[:2] for use in find_removed_uses(source)] == expected


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(
    "name",
    [
        "jax.core.gensym",
        "jax.core.raise_as_much_as_possible",
        pytest.param("jax.experimental.jax2tf", marks=pytest.mark.slow),  # imports TensorFlow
    ],
)
def test_the_installed_libraries_have_the_last_word(tmp_path, capsys, name):
    home, _, attribute = name.rpartition(".")
    file = tmp_path / "a.py"
    file.write_text(f"from {home} import {attribute}\n")
    try:
        exec(f"from {home} import {attribute}")
    except ImportError as error:
        there = isinstance(error, ModuleNotFoundError)  # of TensorFlow: not ours to judge
    else:
        there = True
    covered = name in removed_names.PROVIDERS
    assert main(["legacy", "--check", str(file)]) == (0 if there or covered else 1)
    printed = capsys.readouterr().out
    assert there or (f"{name}  covered" if covered else f"{name}  not covered  not in jax {jax.__version__}") in printed


def test_a_module_is_read_and_not_imported(tmp_path, monkeypatch):
    package = tmp_path / "optax"
    package.mkdir()
    (package / "__init__.py").write_text("from somewhere import adam as sgd\nif sgd: chain = 1\n")
    (package / "stops.py").write_text("raise RuntimeError('imported')\nx = 1\n")
    (package / "shares.py").write_text("from nothing_like_it import *\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in [name for name in sys.modules if name.partition(".")[0] == "optax"]:
        monkeypatch.delitem(sys.modules, module)
    for cached in (installed_libraries.missing, installed_libraries._is_module, installed_libraries._source):
        cached.cache_clear()
    missing = {name: installed_libraries.missing(f"optax.{name}") for name in (
        "sgd", "chain", "adam", "stops.x", "stops.y.z", "shares.x", "gone.x")}  # fmt: skip
    installed_libraries.missing.cache_clear()
    assert {name: found for name, found in missing.items() if found} == {
        "adam": "optax.adam", "stops.y.z": "optax.stops.y", "gone.x": "optax.gone"}  # fmt: skip
    assert "optax" not in sys.modules


@pytest.mark.multiprocess
def test_tensorflow_is_not_imported_to_name_what_needs_it(tmp_path):
    (tmp_path / "a.py").write_text(
        "from jax.experimental import jax2tf\njax2tf.convert(f)\nimport haiku as hk\nhk.nothing\n"
    )
    code = "import sys\nfrom shardformer.__main__ import main\nstatus = main(['legacy', '--check', 'a.py'])\n"
    code += "print(status, {'tensorflow', 'jax.experimental.jax2tf'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.stdout.splitlines()[-1] == "1 set()", done.stderr
    assert "haiku.nothing  not covered" in done.stdout


@pytest.mark.parametrize(
    ("words", "status", "printed"),
    [
        (
            ["--check", "a.py"],
            1,
            "jax.mask; without jax, names that it still has are listed too;",
        ),
        (["a.py"], 2, "jax is not installed"),
        (["--migrate", "a.py"], 2, "jax is not installed"),
    ],
)
@pytest.mark.multiprocess
def test_check_runs_without_any_package(tmp_path, words, status, printed):
    (tmp_path / "a.py").write_text("import jax\njax.mask\njax.tree_map\njax.config.update('jax_enable_x64', 1)\n")
    command = [sys.executable, "-S", "-m", "shardformer", "legacy", *words]  # -S: no site-packages
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
                          capture_output=True, text=True, timeout=600)  # fmt: skip
    assert done.returncode == status, done.stderr
    assert printed in done.stdout + done.stderr


def test_what_stays_away_is_nowhere_in_the_installed_libraries():
    there = [
        name
        for name in removed_names.NOT_COVERED.keys() - LIBRARY_NAMES.keys()
        if installed_libraries.missing(name) is None
    ]
    assert [name for name in there if not name.startswith("jax.config.")] == ["jax.ad"]  # another thing today
    assert not [name for name in there if hasattr(jax.config, name.removeprefix("jax.config."))]


def test_the_table_of_a_tree(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "code" / "package"
    package.mkdir(parents=True)
    (package / "a.py").write_text(f"from {MAPS} import xmap, soft_pmap\nraise SystemExit('imported')\n")
    (package.parent / "b.py").write_text("import jax\njax.soft_pmap(f)\njax.tree_leaves()\n")
    (package / "c.txt").write_text("import jax\njax.tree_map\n")
    (tmp_path / "code" / ".hidden").mkdir()
    (tmp_path / "code" / ".hidden" / "d.py").write_text("import jax\njax.tree_map\n")
    assert main(["legacy", "--check", "code"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0].strip() for line in out[1:5]] == [
        "code/b.py:2", "code/b.py:3", "code/package/a.py:1", "code/package/a.py:1"]  # fmt: skip
    columns = [out[0].index(word) for word in ("name", "status", "today")]
    for line, name, status in zip(
        out[1:5],
        ("jax.soft_pmap", "jax.tree_leaves", f"{MAPS}.soft_pmap", f"{MAPS}.xmap"),
        ("not covered", "covered", "not covered", "covered"),
        strict=True,
    ):
        assert line[columns[0] :].startswith(f"{name} ")
        assert line[columns[1] :].startswith(f"{status} ")
    assert out[1].endswith(removed_names.today("jax.soft_pmap"))
    assert out[3].endswith(f"{MAPS} comes back without it")
    assert out[-1] == (
        f"4 uses of 4 removed names in 2 files; 2 of them not covered: {MAPS}.soft_pmap, jax.soft_pmap; {UNSEEN}"
    )


def test_the_cells_of_a_notebook_share_their_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    cells = notebook(
        "!pip install jax\nimport os\n%cd x\nfiles = !ls\nif files:\n  !rm x\nos?",
        "%%bash\nfor i in 1 2; do echo; done",
        ["%%time\n", f"import {MAPS} as m"],
        "m.xmap(f)",
    )
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "a.ipynb").write_bytes(cells)
    assert main(["legacy", "--check", "folder"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in out[1:3]] == [
        "folder/a.ipynb: code cell 3, line 2", "folder/a.ipynb: code cell 4, line 1"]  # fmt: skip
    assert out[-1] == f"2 uses of 2 removed names in 1 file; all covered; {UNSEEN}"


@pytest.mark.parametrize(
    "cell",
    [
        "!git clone --depth=1 \\\n     https://example.org/x \\\n   there\nx = 1",
        "if fresh:\n  %pip install \\\n     jax\nx = 1",
        "#@title install\n%%bash\npip -q install x\nfor i in 1 2; do echo; done",
        " x = 0\n for y in z:\n  x += 1",
        "f('%5d'\n  % (x, y))\nx = f(a\n  %b)",
    ],
)
def test_cells_of_shell_and_magic_lines_are_read(tmp_path, capsys, cell):
    (tmp_path / "a.ipynb").write_bytes(notebook(cell, "import jax\njax.tree_map"))
    assert main(["legacy", "--check", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not read" not in out
    assert "code cell 2, line 2" in out


def test_a_folder_without_any_code(tmp_path, capsys):
    assert main(["legacy", "--check", str(tmp_path)]) == 2
    assert "no .py or .ipynb file found in" in capsys.readouterr().err


def test_all_covered(tmp_path, capsys):
    file = tmp_path / "a.py"
    file.write_text("from jax import tree_leaves\n")
    assert main(["legacy", "--check", str(file)]) == 0
    assert capsys.readouterr().out.endswith(f"\n\n1 use of 1 removed name in 1 file; all covered; {UNSEEN}\n")


def test_nothing_removed(tmp_path, capsys):
    (tmp_path / "a.py").write_text("import jax\njax.jit\n")
    assert main(["legacy", "--check", str(tmp_path), str(tmp_path / "a.py")]) == 0
    assert capsys.readouterr().out == f"0 uses of 0 removed names in 2 files; {UNSEEN}\n"


@pytest.mark.parametrize(
    ("name", "content", "place", "reason"),
    [
        ("two.py", b"import jax\nprint 'x'\n", "two.py:2", "not Python 3: Missing parentheses"),
        ("bytes.py", b"x = '\xff'\n", "bytes.py:1", "not Python 3: (unicode error)"),
        ("zero.py", b"x = 1\0\n", "zero.py", "null bytes"),
        ("deep.py", b"x = 1" + b" + 1" * 5_000, "deep.py", "recursion"),
        ("deeper.py", b"-" * 100_000 + b"1", "deeper.py", "e"),  # the parser's own limit
        ("cells.ipynb", b'{"worksheets": []}', "cells.ipynb", "not a notebook of version 4 (KeyError: 'cells')"),
        ("json.ipynb", b"x = 1", "json.ipynb", "not a notebook of version 4 (JSONDecodeError"),
        ("old.ipynb", notebook("x = 1\nprint 'x'"), "old.ipynb: code cell 1, line 2", "not Python 3: Missing"),
    ],
)
def test_what_cannot_be_read_is_said_and_the_rest_is(tmp_path, monkeypatch, capsys, name, content, place, reason):
    monkeypatch.chdir(tmp_path)
    (tmp_path / name).write_bytes(content)
    (tmp_path / "z.py").write_text("from jax import tree_leaves\n")
    assert main(["legacy", "--check", name, "z.py"]) == 1
    out = capsys.readouterr().out
    (line,) = (line for line in out.splitlines() if line.startswith(place))
    assert "  not read  " in line
    assert reason in line
    assert "z.py:1" in out
    assert out.endswith(f"all covered; 1 file or cell not read; {UNSEEN}\n")


def test_old_escapes_are_no_concern(tmp_path, recwarn):
    (tmp_path / "a.py").write_text("x = '\\d'\n")
    assert main(["legacy", "--check", str(tmp_path)]) == 0
    assert not recwarn.list


def test_a_path_that_is_not_there(capsys):
    assert main(["legacy", "--check", "nowhere"]) == 2
    assert capsys.readouterr().err == "shardformer: error: nowhere: no such file or folder\n"


def test_pipes_are_left_alone(tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe.py")
    (tmp_path / "a.py").write_text("x = 1")
    assert main(["legacy", "--check", str(tmp_path)]) == 0
    assert "in 1 file;" in capsys.readouterr().out
    lambdas = b"from jax.experimental.maps import xmap\nxmap(" + b"lambda:" * 2_000 + b"0)"
    for name, content, message in (
        ("pipe.py", None, "a pipe"),
        ("deep.py", b"-" * 100_000 + b"1", "too deeply"),
        ("lambdas.py", lambdas, "too deeply"),
    ):
        if content:
            (tmp_path / name).write_bytes(content)
        assert main(["legacy", "--migrate", str(tmp_path / name)]) == 1
        assert message in capsys.readouterr().err


def test_a_folder_without_init_in_a_library_is_looked_up(tmp_path, monkeypatch):
    inner = tmp_path / "haiku" / "private" / "inner"
    inner.mkdir(parents=True)
    (tmp_path / "haiku" / "__init__.py").write_text("")
    (tmp_path / "haiku" / "private" / "__init__.py").write_text("")
    (inner / "module.py").write_text("x = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    for name in [name for name in sys.modules if name.partition(".")[0] == "haiku"]:
        monkeypatch.delitem(sys.modules, name)
    for function in (installed_libraries.missing, installed_libraries._is_module, installed_libraries._source):
        function.cache_clear()
        monkeypatch.setattr(installed_libraries, function.__name__, functools.cache(function.__wrapped__))
    assert installed_libraries.missing("haiku.private.inner.module.x") is None
    assert installed_libraries.missing("haiku.private.inner.module.y") == "haiku.private.inner.module.y"
