"""--migrate: removed names, keywords, members and imports, in one file and in a tree."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from shardformer import legacy
from shardformer.__main__ import main
from shardformer.legacy.migration import migrate, name_targets
from shardformer.legacy.removed_uses import find_removed_uses
from tests.legacy.migrated_code import SCALE, load, migrated, run


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import jax\njax.tree_map(f, x)  # kept", "import jax\njax.tree.map(f, x)  # kept"),
        ("import jax as j\nj.tree_multimap(f, x)", "import jax as j\nj.tree.map(f, x)"),
        ("from jax import tree_map as tm, jit\ntm(f)",
         "from jax import jit\nfrom jax.tree_util import tree_map as tm\ntm(f)"),
        ("import jax\ndef f(key: jax.random.KeyArray): pass", "import jax\ndef f(key: jax.Array): pass"),
        ("import jax.numpy as jnp\njnp.trapz(jnp.NINF * y)", "import jax.numpy as jnp\njnp.trapezoid((-jnp.inf) * y)"),
        ("import jax.numpy as jnp\njnp.where(c, x=1,\n  y=2)", "import jax.numpy as jnp\njnp.where(c, 1,\n  2)"),
        ("import jax\nimport flax\nflax.nn.relu(x)", "import jax\nimport flax\njax.nn.relu(x)"),
        ("import jax\nimport jax.numpy as jnp\nx = jax.ops.index_update(x, jax.ops.index[:, 0], y)",
         "import jax\nimport jax.numpy as jnp\nx = jnp.asarray(x).at[:, 0].set(y)"),
        ("from jax.ops import index, index_add\nx = index_add(index_add(x, index[1], y), 0, z)",
         "import jax\nx = jax.numpy.asarray(jax.numpy.asarray(x).at[1].add(y)).at[0].add(z)"),
        ("from jax.config import config\nconfig.update('jax_array', True)\nconfig.update('jax_enable_x64', True)",
         "from jax import config\nconfig.update('jax_enable_x64', True)"),
        ("from jax.experimental import optimizers, ode\noptimizers.sgd",
         "from jax.experimental import ode\nfrom jax.example_libraries import optimizers\noptimizers.sgd"),
        ("import jax.numpy as jnp\njnp.reshape(x, newshape=2)", "import jax.numpy as jnp\njnp.reshape(x, shape=2)"),
        ("import jax\njax.lax.cond(p, f, g, x, linear=(1,))", "import jax\njax.lax.cond(p, f, g, x)"),
        ("import jax\nx.device_buffer.y\njax.core.get_aval(x)", "import jax\nx.addressable_data(0).y\njax.typeof(x)"),
        ("import jax\n[b.device() for b in x.device_buffers]\n(x.device_buffers[1].device(), x.device_buffer.device())",
         "import jax\n[b.device for b in [shard.data for shard in x.addressable_shards]]\n"
         "([shard.data for shard in x.addressable_shards][1].device, x.addressable_data(0).device)"),
        ("from jax.experimental.pjit import pjit\nimport jax\nf = pjit(g, in_axis_resources=(a, None))",
         "import jax\nfrom shard_map_helpers import jit_in_layout\n"
         "f = jit_in_layout(g, in_shardings=(a, jax.sharding.PartitionSpec()))"),
        ("from jax.experimental.pjit import pjit\nf = pjit(in_axis_resources=a, fun=g)",
         "from shard_map_helpers import jit_in_layout\nf = jit_in_layout(g, in_shardings=a)"),
        ("from jax.experimental.pjit import pjit\nf = pjit(g, out_axis_resources=a)",
         "from shard_map_helpers import jit_in_layout\nf = jit_in_layout(g, out_shardings=a)"),
        ("import jax\nfrom jax.experimental import host_callback as h\ny = h.call(f, x, result_shape=s)\n"
         "h.id_tap(g, x)",
         "import jax\nimport jax.experimental\n"
         "y = jax.experimental.io_callback(f, s, x)\njax.debug.callback(g, x, ())"),
        ("import jax.tools.colab_tpu\ndef setup():\n    jax.tools.colab_tpu.setup_tpu()",
         "import jax\ndef setup():\n    pass"),
        ("import jax\nx = jax.device_put_replicated(x, d)",
         "import jax\nfrom shard_map_helpers import device_put_replicated\nx = device_put_replicated(x, d)"),
        ("import jax\nisinstance(x, jax.ad.JVPTracer)", "import jax\nisinstance(x, jax.interpreters.ad.JVPTracer)"),
        ("from jax import dlpack\nf(dlpack.to_dlpack(x[0]), dlpack.to_dlpack(x + y))",
         "from jax import dlpack\nf(x[0].__dlpack__(), (x + y).__dlpack__())"),
        ("from jax.api import grad, vmap as v\ngrad(v(f))",
         "from jax import grad\nfrom jax import vmap as v\ngrad(v(f))"),
        ("from jax.interpreters import ad\ndef linearize(f): return ad.linearize(f, 1) if p.map_primitive else f",
         "from jax.interpreters import ad\nfrom legacy_core_functions import linearize as legacy_linearize\n"
         "def linearize(f): return legacy_linearize(f, 1) if False else f"),
        ("from jax.interpreters import ad\nad.config.jax_enable_checks\nad.source_info_util.current()",
         "from jax.interpreters import ad\nimport jax\nimport jax.extend\n"
         "jax.config.jax_enable_checks\njax.extend.source_info_util.current()"),
        ("import optax\nclass S(optax.OptState): x: 1",
         "import optax\nimport typing\nclass S(typing.NamedTuple): x: 1"),
    ],
)  # fmt: skip
def test_a_removed_name_becomes_todays(tmp_path, source, expected):
    found = migrated(tmp_path, source)
    assert found.migrated.strip() == expected
    assert found.undecided == []
    assert migrated(tmp_path, found.migrated).migrated == found.migrated


def test_lost_name_of_a_moved_module_is_listed(tmp_path):
    result = migrated(tmp_path, "from jax.lib import xla_client as xc\nxc.ops.Tuple\nxc.FftType\n")
    assert [reason.partition(": ")[2].split()[0] for reason in result.undecided] == ["jax.lib.xla_client.ops"]


@pytest.mark.usefixtures("helpers")
def test_pjit_moves_what_its_mesh_holds_in_another_layout(tmp_path):
    source = "import jax\nimport jax.numpy as jnp\nfrom jax.experimental.maps import Mesh\n"
    source += "from jax.experimental.pjit import pjit\nfrom jax.sharding import PartitionSpec as P\n"
    source += "def total(x, n):\n    return n * jnp.sum(x['a']), x['a']\n"
    source += "f = pjit(total, in_axis_resources=({'a': P('x')},), out_axis_resources=None, static_argnums=1)\n"
    source += "with Mesh(jax.devices(), ('x',)):\n    x = {'a': jnp.arange(8)}\n    result = f(x, 2)\n"
    source += "    text = f.lower(x, 2).as_text()\n"
    names = load(migrated(tmp_path, source).migrated)
    assert int(names["result"][0]) == 56
    assert "sharding" in names["text"]
    with pytest.raises(ValueError, match="does not match the sharding"):
        load(migrated(tmp_path, source).migrated.replace("jit_in_layout(", "jax.jit("))


@pytest.mark.parametrize(
    ("source", "is_left"),
    [
        ("from tensorflow_probability.substrates import jax as tfp", True),
        ("import distrax as d", True),
        ("from tensorflow_probability.substrates import numpy as tfp", False),
    ],
)
def test_tensorflow_probability_for_jax_is_listed(tmp_path, source, is_left):
    """Its last release cannot be imported without `legacy`; its version for NumPy can."""
    result = migrated(tmp_path, f"x = 1\n{source}\n")
    left = [reason for reason in result.undecided if ":2: TensorFlow Probability 0.25, the last release" in reason]
    assert len(left) == is_left


@pytest.mark.parametrize(
    "uses",
    [
        "[[b.device() for b in y] for b in x.device_buffers]",
        "[(lambda b: b.device())(y) for b in x.device_buffers]",
        "[b.device() for b in x.device_buffers for b in b.y]",
    ],
)
def test_device_of_a_name_with_another_meaning_is_listed(tmp_path, uses):
    found = migrated(tmp_path, f"import jax\n{uses}\n")
    assert "b.device()" in found.migrated
    assert len(found.undecided) == 1


def test_keywords_out_of_order_stay(tmp_path):
    found = migrated(tmp_path, "import jax.numpy as jnp\njnp.where(c, y=2, x=1)")
    assert "jnp.where(c, y=2, x=1)" in found.migrated
    assert len(found.undecided) == 1


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import jax\njax.soft_pmap(f)\n", "2: jax.soft_pmap has no mechanical answer; today: jax.experimental.maps"),
        ("from jax import lib\nlib.xla_client.ops.Tuple\n", "2: jax.lib.xla_client.ops has no mechanical answer"),
        ("import jax\njax.random.default_prng_impl()\n", "2: jax.random.default_prng_impl has no mechanical answer"),
        ("import jax\n[b for b in x]\nb.device()\n", "3: x.device() has no mechanical answer"),
    ],
)
def test_a_removed_name_without_an_answer_is_listed(tmp_path, source, reason):
    found = migrated(tmp_path, source)
    assert found.migrated == source
    assert found.undecided[0].startswith(f"{tmp_path / 'old.py'}:{reason}")


COPIED = """\
import jax
import jax.numpy as jnp
from jax import util
from jax.experimental import host_callback as hcb
from jax.linear_util import wrap_init
from jax.sharding import PmapSharding
from jax.util import safe_map, partial

def run():
    x = jnp.arange(8.0).reshape(2, 4)
    tapped = hcb.id_tap(lambda *_: None, x)
    sharding = jax.sharding.PmapSharding.default((2, 4), devices=jax.devices()[:2])
    same = sharding == PmapSharding.default((2, 4), devices=jax.devices()[:2])
    first, second = x.split(2, axis=1)
    parts = [jnp.sum(each) for each in jax.Array.split(x * 2, [1])]
    return (tapped, jax.device_put(x, sharding), jnp.array(same), second, parts, safe_map(lambda a, b: a + b, [1], [2]),
            util.unzip2([(1, 2)]), wrap_init(partial(jnp.add, 1)).call_wrapped(2), jax.random.rbg_key(0),
            jax.scipy.special.sph_harm(jnp.array([1]), jnp.array([2]), jnp.ones(1), jnp.ones(1), n_max=2),
            jax.xla_computation(jnp.sin)(1.0).as_hlo_text().count("sine"))
"""


def test_removed_files_are_copied_beside_the_code(tmp_path, monkeypatch):
    with legacy.installed():
        expected = run(COPIED)
    found = migrated(tmp_path, COPIED)
    assert found.undecided == []
    assert find_removed_uses(found.migrated) == []
    assert found.helpers == {f"legacy_{name}" for name in (
        "host_callback", "jax_linear_util", "jax_util", "pmap_shardings", "xla_computation")}  # fmt: skip
    for name in found.helpers:
        text = name_targets.HELPER_FILES[name].read_text()
        assert "import shardformer" not in text
        assert "from shardformer" not in text
        (tmp_path / f"{name}.py").write_text(text)
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    got = run(found.migrated)
    assert len(got) == len(expected) == 13
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_array_equal(ours, theirs)


@pytest.mark.parametrize("name", name_targets.HELPER_FILES)
def test_a_helper_file_needs_no_shardformer(name):
    tree = ast.parse(name_targets.HELPER_FILES[name].read_text())
    imports = [line for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)
               for line in ast.unparse(node).splitlines()]  # fmt: skip
    assert [line for line in imports if "shardformer" in line or "from ." in line] == []


def test_a_name_that_the_copied_file_lacks_is_listed(tmp_path):
    found = migrated(tmp_path, "from jax import util\nutil.no_such(x)\nutil.safe_map(f, x)\n")
    assert [line.partition("old.py:")[2][:21] for line in found.undecided] == ["2: jax.util.no_such h"]


def test_names_of_a_copied_module_are_not_listed(tmp_path):
    used = "flax.optim.Adam(1), flax.optim.Momentum(1)"
    found = migrated(tmp_path, f"import flax\ndef f(o: flax.optim.Optimizer): return {used}, flax.optim.LARS\n")
    assert [line.partition("old.py:")[2][:18] for line in found.undecided] == ["2: flax.optim.LARS"]
    assert "def f(o: Optimizer): return Adam(1), Momentum(1)," in found.migrated


def test_a_file_of_the_users_is_not_replaced(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "legacy_jax_util.py").write_text("mine = 1\n")
    (tmp_path / "old.py").write_text("from jax.util import safe_map\n")
    assert main(["legacy", "--migrate", "old.py"]) == 2
    assert "legacy_jax_util.py: the patch would replace this file with a helper" in capsys.readouterr().err


@pytest.mark.parametrize("call", [
    "s.split(',')", "s.split()", "s.split(None, 1)", "s.split(',', 2)", "rngs.split(2)", "t.split(2, dim=1)",
    "t.reshape(4).split(1, dim=1)",
    "'a b'.split(' ')", "folds.split(x, y)", "pattern.split(text, 3)"])  # fmt: skip
def test_a_split_of_something_else_stays(tmp_path, call):
    source = f"import jax\nx = {call}\n"
    assert find_removed_uses(source) == []
    assert migrated(tmp_path, source).migrated == source


def test_a_notebook_is_listed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, code in {"old": "import jax\njax.tree_map(f, jax.tree_map(g, x))", "new": "import jax"}.items():
        cells = [{"cell_type": "code", "source": code}]
        (tmp_path / f"{name}.ipynb").write_text(json.dumps({"nbformat": 4, "cells": cells}))
    assert main(["legacy", "--migrate", "."]) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[0].endswith("1 place left")
    assert lines[1].startswith("  old.ipynb: a notebook is not rewritten; ")
    assert lines[1].endswith("removed names: 1")


def test_packages_of_a_package_share_its_helpers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    inner = tmp_path / "outer" / "middle" / "inner"
    inner.mkdir(parents=True)
    for folder in (inner, inner.parent, inner.parent.parent):
        (folder / "__init__.py").write_text("")
        (folder / "step.py").write_text(SCALE)
        (folder / "pairs.py").write_text("from jax import util\nprint(util.safe_map(max, [1], [3]))\n")
    assert main(["legacy", "--migrate", "."]) == 0
    subprocess.run(["git", "apply", "-"], input=capsys.readouterr().out, text=True, check=True)
    helpers = sorted(str(path.relative_to(tmp_path)) for path in tmp_path.rglob("*_*.py") if path.stem[0] != "_")
    assert helpers == ["outer/legacy_jax_util.py", "outer/shard_map_helpers.py"]
    assert "from ...shard_map_helpers import" in (inner / "step.py").read_text()
    for home in ("outer", "outer.middle", "outer.middle.inner"):
        code = f"import {home}.step, {home}.pairs"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
        assert done.stdout == "[3]\n", done.stderr
    assert main(["legacy", "--migrate", "outer/middle"]) == 0  # has nothing left to rewrite
    assert "0 of 6 files changed" in capsys.readouterr().err


def test_names_that_a_file_assigns_stay(tmp_path):
    source = "import numpy as np\nnp.float = float\nimport optax\noptax.big = 1\n"
    assert migrated(tmp_path, source).migrated == source
    assert migrated(tmp_path, source).undecided == []


def test_progress_of_a_long_migration_is_shown(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.py").write_text("")
    (tmp_path / "b.py").write_text("")
    assert migrate.migrate([Path()], seconds_to_progress=-1) == 0
    assert capsys.readouterr().err.splitlines()[1] == "1 of 2 files read, next b.py"


def test_a_tree_is_one_patch_with_its_helpers(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").write_text("import jax\nx = jax.tree_leaves(1)\n")
    (package / "step.py").write_text(SCALE)
    (tmp_path / "run.py").write_text("from package.step import f\n")
    assert main(["legacy", "--migrate", "."]) == 0
    out, err = capsys.readouterr()
    lines = [line for line in err.splitlines() if "files read" not in line]  # those come every five seconds
    assert lines == ["1 xmap rewritten, 2 of 3 files changed, 0 places left"]
    subprocess.run(["git", "apply", "-"], input=out, text=True, check=True)
    assert "from .shard_map_helpers import" in (package / "step.py").read_text()
    assert main(["legacy", "--check", "."]) == 0
    assert capsys.readouterr().out.startswith("0 uses of 0 removed names in 4 files")
    code = "import jax, numpy, run, sys; from package.shard_map_helpers import mesh_scope\n"
    code += "with mesh_scope(jax.sharding.Mesh(numpy.array(jax.devices()[:1]), ('x',))): print(run.f(numpy.ones(1)))\n"
    code += "print('shardformer' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=600)
    assert done.stdout.split() == ["[1.]", "False"], done.stderr


def test_tree_has_one_helper_where_its_files_need_the_root(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    source = "import jax\nx = jax.device_put_replicated(1, jax.devices())\n"
    for name, text in {
        "code/run/train.py": f"from code.models import (\n    net as n,\n)\n{source}",
        "code/models/net.py": source,
        "tools/alone.py": source,
        "tools/script.py": f"import code.models.net\nimport tools.script\n{source}",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    assert main(["legacy", "--migrate", "."]) == 0
    added = [line for line in capsys.readouterr().out.splitlines() if line.startswith("+++") and "helpers" in line]
    assert added == ["+++ b/shard_map_helpers.py", "+++ b/tools/shard_map_helpers.py"]
