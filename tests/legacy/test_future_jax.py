"""The legacy suite without pxla.thread_resources, Mesh.__enter__ and Mesh.__exit__, which jax is about to remove."""

import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from shardformer.legacy import installed, mesh_in_scope, xmap

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
# One case enters a mesh as mesh-transformer-jax does; JAX's own suite enters it as tests/legacy/test_xmap.py does.
PROGRAM, VARIABLE = "test_mesh_transformer.py", "MESH_TRANSFORMER_JAX"
CASE = "test_the_numbers and rotary and generate"


def run_pytest(*words, **variables):
    """Runs tests in a process that imports nothing of shardformer before the plugin."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *words]
    own = ("XLA_FLAGS", "NPROC", "SHARDFORMER_CACHE")  # what tests/conftest.py sets; the cache of programs is shared
    environment = {name: value for name, value in os.environ.items() if name not in own} | variables
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0, done.stdout[-4000:]


def test_suite_passes_without_the_removed_parts():
    files = ("test_xmap.py", "test_pjit.py")  # they enter, assign and nest meshes in every way; others repeat one
    run_pytest("-p", "tests.legacy.future_jax", *(str(HERE / file) for file in files))


def test_published_program_passes_without_the_removed_parts():
    if VARIABLE not in os.environ:
        pytest.skip(f"NOT RUN: {VARIABLE} is not set, see {PROGRAM}")
    run_pytest(str(HERE / PROGRAM), "-k", CASE, FUTURE_JAX="1")


def test_plugin_removes_the_parts_from_jax():
    code = "from tests.legacy import future_jax; from jax.sharding import Mesh; from jax.interpreters import pxla\n"
    code += "print(hasattr(Mesh, '__enter__'), hasattr(Mesh, '__exit__'), hasattr(pxla, 'thread_resources'))\n"
    code += "import shardformer.legacy; print(hasattr(Mesh, '__enter__'), hasattr(Mesh, '__exit__'))\n"
    code += "shardformer.legacy.install(); print(dict(pxla.thread_resources.env.shape))\n"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.stdout.splitlines() == ["False False False", "True True", "{}"], done.stderr


@pytest.fixture
def no_mesh_contexts():
    jax.config.update("jax_disallow_mesh_context_manager", True)
    yield
    jax.config.update("jax_disallow_mesh_context_manager", False)


def test_a_mesh_is_entered_where_jax_disallows_it(no_mesh_contexts):
    mesh = Mesh(np.array(jax.devices()[:2]), ("x",))
    with installed(), mesh:
        total = xmap(lambda x: jax.lax.psum(x, "i"), ["i", ...], [...], axis_resources={"i": "x"})(np.ones((2, 3)))
        split = jax.jit(lambda x: jax.lax.with_sharding_constraint(x, PartitionSpec("x")))(total[:2])
    assert total.tolist() == [2, 2, 2]
    assert split.sharding.spec == PartitionSpec("x")
    assert mesh_in_scope.current_mesh() is None
    with pytest.raises(RuntimeError, match="disabled"):
        mesh_in_scope._jax_enter(mesh)
