"""`legacy --migrate` of code of 2022 without xmap: nothing is left, and the result runs on jax alone."""

import os
import subprocess
import sys

import pytest

from shardformer.__main__ import main

OLD = """\
# A tree of 2022.
import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_map, tree_multimap
from jax.config import config
from jax.experimental import host_callback as hcb
from jax.experimental import maps
from jax.experimental.maps import Mesh, mesh
from jax.experimental.pjit import pjit, PartitionSpec as P
from jax.random import KeyArray
from jax.ops import index_update, index

config.update("jax_array", True)
config.enable_omnistaging()
config.update("jax_enable_x64", False)


def draw(key: KeyArray, shape) -> jnp.DeviceArray:
    return jax.random.fold_in(key, 3)[:2] * 1.0


def tree(x):
    a = jax.tree_map(lambda v: v + 1, x)  # keep this comment
    b = tree_multimap(lambda u, v: u * v, a, x)
    leaves, treedef = jax.tree_flatten(b)
    return jax.tree_unflatten(treedef, leaves), len(jax.tree_leaves(b))


def update(x):
    x = index_update(x, index[1:3], 7.0)
    return jax.ops.index_add(x, jax.ops.index[0], 2.0)


def host(x):
    return hcb.call(lambda v: np.asarray(v) * 2, x, result_shape=x)


def sharded(x):
    devices = np.array(jax.devices()[:4]).reshape(2, 2)
    with Mesh(devices, ("dp", "mp")):
        f = pjit(lambda v: v * 2, in_axis_resources=P("dp", "mp"), out_axis_resources=None)
        y = f(x)
    with maps.mesh(devices, ("dp", "mp")):
        g = pjit(lambda v: v + 1, in_axis_resources=(P("dp"),), out_axis_resources=P("dp"))
        return y, g(x)


def replicated(x):
    return jax.device_put_replicated(x, jax.local_devices()[:2])
"""
RUN = """
x = jnp.arange(16.0).reshape(4, 4)
assert tree({"a": jnp.arange(3.0)})[0]["a"].tolist() == [0, 2, 6]
assert update(jnp.zeros(4)).tolist() == [2, 7, 7, 0]
assert host(jnp.arange(3.0)).tolist() == [0, 2, 4]
assert [float(np.asarray(v).sum()) for v in sharded(x)] == [240, 136]
assert replicated(jnp.ones(2)).shape == (2, 2)
import sys
assert "shardformer" not in sys.modules
"""


@pytest.mark.multiprocess
def test_an_old_tree_runs_on_jax_alone_after_its_patch(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(OLD)
    assert main(["legacy", "--check", "old.py"]) == 0
    before = capsys.readouterr().out
    assert "jax.ops.index_update" in before
    assert main(["legacy", "--migrate", "."]) == 0
    patch, said = capsys.readouterr()
    assert said.endswith("0 places left\n")
    subprocess.run(["git", "apply", "-"], input=patch, text=True, check=True)
    assert main(["legacy", "--check", "."]) == 0
    assert capsys.readouterr().out.startswith("0 uses of 0 removed names")
    assert "# keep this comment" in (tmp_path / "old.py").read_text()
    code = (tmp_path / "old.py").read_text() + RUN
    devices = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", code], env=devices, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr


@pytest.mark.multiprocess
def test_helpers_are_found_from_a_folder_that_is_no_package(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "pairs.py").write_text("from jax.util import safe_map\nprint(safe_map(max, [1, 5], [3, 2]))\n")
    (tmp_path / "main.py").write_text("from lib import pairs\n")
    assert main(["legacy", "--migrate", "."]) == 0
    subprocess.run(["git", "apply", "-"], input=capsys.readouterr().out, text=True, check=True)
    for script in ("main.py", "lib/pairs.py"):
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, timeout=600)
        assert done.stdout == "[3, 5]\n", done.stderr
