"""Migrated xmaps under meshes: where the mesh comes from, what a file imports, and axes longer than their mesh axes."""

import contextlib

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from shardformer import legacy
from shardformer.legacy.migration import shard_map_helpers
from tests.legacy.migrated_code import HEAD, SCALE, load, migrated, run

pytestmark = pytest.mark.usefixtures("helpers")


def line_of(number, reverse=False):
    devices = jax.devices()[:number]
    return jax.sharding.Mesh(np.array(devices[::-1] if reverse else devices), ("x",))


def test_first_use_may_be_under_an_outside_gradient(tmp_path):
    f = load(migrated(tmp_path, SCALE).migrated)["f"]
    x = np.arange(4, dtype=np.float32)
    for mesh in (line_of(4), line_of(4, reverse=True)):
        with shard_map_helpers.mesh_scope(mesh):
            gradient = jax.grad(lambda x: f(x)[0])(x)
            value = f(x)
        np.testing.assert_allclose(gradient, [6, 0, 0, 0] + np.float32([0, 0, 0, 0]))
        assert value.sharding.mesh.devices.tolist() == mesh.devices.tolist()


def test_without_a_mesh_in_scope_a_migrated_xmap_raises(tmp_path):
    f = load(migrated(tmp_path, SCALE).migrated)["f"]
    x = np.arange(4, dtype=np.float32)
    with shard_map_helpers.mesh_scope(line_of(4)):
        f(x)
    for call in (f, jax.grad(lambda x: f(x)[0])):
        with pytest.raises(ValueError, match="no mesh is in scope; call inside `with mesh_scope"):
            call(x)


def test_a_file_that_would_not_import_is_reported(tmp_path):
    source = f"from jax.lax import pdot\n{SCALE}h = pdot(x, y, 'i')\n"
    found = migrated(tmp_path, source)
    assert [line.partition("old.py:")[2].split(" ")[:2] for line in found.undecided] == [["1:", "jax.lax.pdot"]]
    assert found.decided == 1


def test_helpers_stay_out_of_the_file_and_lines_are_short(tmp_path):
    long = "({'w': ['i', ...], 'longer name': ['i', ...], 'another': ['i', ...]}, ['i', ...], ['i', None, ...], [...])"
    source = f"{HEAD}f = xmap(g, {long}, {{'w': ['i', ...], 'the result': ['i', ...]}}, axis_resources={{'i': 'x'}})\n"
    text = migrated(tmp_path, source).migrated
    assert "def " not in text
    assert max(map(len, text.splitlines())) <= 100


LARGER = f"""{HEAD}
import jax, jax.numpy as jnp, numpy as np

def loss(w, x):
    y = jax.lax.psum(x @ w, "i") + jax.lax.axis_index("i").astype(x.dtype) * jax.lax.pmean(jnp.sum(x), ("i", "j"))
    return jnp.sum(y**2), jnp.cos(jax.lax.all_gather(x, "j"))

def train(w, x):
    (value, other), gradient = jax.value_and_grad(loss, has_aux=True)(w, x)
    return value, {{"w": w - 0.1 * jax.lax.pmean(gradient, "j"), "o": other}}

f = xmap(train, in_axes=(["i", ...], {{1: "i", 0: "j"}}), axis_resources={{"i": "x", "j": "y"}},
         out_axes=([...], {{"w": ["i", "j", ...], "o": {{2: "j", 0: "i"}}}}))
h = xmap(lambda x: x - jax.lax.pmax(x, "i"), ["i", ...], ["i", ...], axis_resources={{"i": ("y", "x")}})
k = xmap(lambda x: x + jax.lax.axis_index("i").astype(x.dtype), [...], ["i", ...],
         axis_sizes={{"i": 8}}, axis_resources={{"i": "x"}})

def numbers(*shape):
    return (np.arange(np.prod(shape)) * 37 % 17 / 16 - 0.5).astype(np.float32).reshape(shape)

def run():
    with Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("x", "y")):
        for i, j in ((2, 2), (6, 4)):
            outside = jax.grad(lambda x: f(numbers(i, 5, 3), x)[0])(numbers(j, i, 4, 5))
            yield f(numbers(i, 5, 3), numbers(j, i, 4, 5)), outside
        yield h(numbers(8, 2)), k(numbers(3))
"""


@pytest.mark.slow
def test_axes_may_be_larger_than_their_mesh_axes(tmp_path):
    with legacy.installed(), pytest.warns(UserWarning, match="index 0"):
        expected = run(LARGER.replace("def run", "def steps") + "def run(): return list(steps())")
    found = migrated(tmp_path, LARGER)
    assert (found.decided, found.undecided) == (3, [])
    got = run(found.migrated.replace("def run", "def steps") + "def run(): return list(steps())")
    assert len(got) == len(expected) == 10
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-5)


def test_an_axis_that_does_not_divide_is_rejected(tmp_path):
    f = load(migrated(tmp_path, SCALE).migrated)["f"]
    with shard_map_helpers.mesh_scope(line_of(4)), pytest.raises(ValueError, match="'i' has length 6; it must be a mu"):
        f(np.ones(6))


DECORATED = """\
import functools
import jax
from jax.experimental.maps import xmap

@functools.partial(xmap, in_axes=["i", "j"], out_axes=["j", "i"], axis_resources={"i": "x"}, donate_argnums=0)
def over_mesh(x):
    "Kept."
    return x + jax.lax.psum(x, "j")

@functools.partial(xmap, in_axes=["i", "j"], out_axes={0: "i", 1: "j"})
def over_nothing(x):
    return x + jax.lax.psum(x, "i")
"""


@pytest.mark.filterwarnings("ignore:Some donated buffers")
def test_a_partial_xmap_may_decorate_a_function(tmp_path):
    found = migrated(tmp_path, DECORATED)
    assert (found.decided, found.undecided) == (2, [])
    x = np.arange(8, dtype=np.float32).reshape(4, 2)
    names = load(found.migrated)
    with shard_map_helpers.mesh_scope(line_of(4)):
        np.testing.assert_array_equal(names["over_mesh"](x), (x + x.sum(1, keepdims=True)).T)
    np.testing.assert_array_equal(names["over_nothing"](x), x + x.sum(0))
    assert names["over_mesh"].__name__ == "over_mesh"


BACKEND = f"""{HEAD}
import functools, jax

@functools.partial(jax.jit, backend="cpu")
def decorated(x):
    return x + 1

called = jax.jit(lambda x: x + 2, static_argnums=(), backend="cpu")
plain = jax.jit(lambda x: x + 3)
f = xmap(decorated, ["i", ...], ["i", ...])
"""


@pytest.mark.filterwarnings("ignore:.*backend and device argument:DeprecationWarning")
def test_a_backend_may_be_named_while_a_mesh_is_set(tmp_path):
    found = migrated(tmp_path, BACKEND)
    assert found.migrated.count("jit_on_backend") == 3
    names = load(found.migrated)
    with shard_map_helpers.mesh_scope(line_of(2)) as mesh:
        assert [float(names[name](1.0)) for name in ("decorated", "called", "plain")] == [2, 3, 4]
        assert jax.sharding.get_mesh() == mesh
        with pytest.raises(ValueError, match="backend"):
            jax.jit(names["plain"], backend="cpu")(1.0)


def test_pjit_sees_a_mesh_that_a_variable_holds(tmp_path):
    """jax.jit does not see the mesh of `with mesh:`; another context of that name is entered as it is."""
    source = "import jax\nfrom jax.experimental.pjit import pjit\n"
    source += "def double(mesh, spec):\n    with mesh:\n"
    source += "        return pjit(lambda x: 2 * x, out_shardings=spec)(jax.numpy.ones(8))\n"
    double = load(migrated(tmp_path, source).migrated)["double"]
    split = PartitionSpec("x")
    assert double(line_of(8), split).sharding.spec == split
    assert double(contextlib.nullcontext(), None).tolist() == [2] * 8
    with pytest.raises(RuntimeError, match="non-empty mesh"):
        double(contextlib.nullcontext(), split)


def test_mesh_of_pxla_is_the_mesh_in_scope(tmp_path):
    """jax still has pxla.thread_resources; a migrated scope leaves its mesh empty, so constraints would be skipped."""
    source = "import jax\nfrom jax.interpreters import pxla\ndef split(x):\n    env = pxla.thread_resources.env\n"
    source += "    if env.physical_mesh.empty or 'x' not in pxla.thread_resources.env.physical_mesh.axis_names:\n"
    source += "        return x\n    return jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec('x'))\n"
    split = jax.jit(load(migrated(tmp_path, source).migrated)["split"])
    ones = np.ones(8, np.float32)
    assert len(split(ones).devices()) == 1
    # Another copy of the helpers calls jax.set_mesh; code that was not migrated enters the mesh, where jax allows it.
    entered = () if getattr(jax.config, "jax_disallow_mesh_context_manager", False) else (lambda mesh: mesh,)
    for scope in (shard_map_helpers.mesh_scope, jax.set_mesh, *entered):
        with scope(line_of(8)):
            assert split(ones).sharding.spec == PartitionSpec("x")
        jax.clear_caches()
