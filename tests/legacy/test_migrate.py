"""`legacy --migrate`: the migrated form of a program runs on jax alone and agrees; what cannot be decided is listed."""

import ast
import subprocess
import textwrap

import numpy as np
import pytest

from shardformer import legacy
from shardformer.__main__ import main
from shardformer.legacy.migration.migrate import migrate_file
from tests.legacy.migrated_code import HEAD, migrated, run

PROGRAM = '''\
"""A small training step as GPT-J's time wrote it."""
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.maps import Mesh, thread_resources, xmap


def block(params, x):
    hidden = jnp.tanh(x @ params["up"] + params["bias"])
    return x + jax.lax.psum(hidden @ params["down"], "shard")


def loss_of(params, x):
    return jnp.mean(jnp.square(block(params, x))) + jax.lax.axis_index("shard").astype(jnp.float32)


def train(params, x):
    loss, gradient = jax.value_and_grad(loss_of)(params, x)
    gradient = jax.lax.pmean(gradient, "batch")
    params = jax.tree_util.tree_map(lambda p, g: p - 0.1 * g, params, gradient)
    return jax.lax.pmean(loss, ("batch", "shard")), params


SPECS = {"shard": "mp", "batch": "dp"}
step = xmap(
    train,
    in_axes=({"up": ["shard", ...], "down": ["shard", ...], "bias": {1: "shard"}}, ["batch", ...]),
    out_axes=([...], {"up": ["shard", ...], "down": ["shard", ...], "bias": {1: "shard"}}),
    axis_resources=SPECS,
    donate_argnums=(0,),
)
heads = xmap(lambda q, k: jax.lax.psum(q @ k.T, "head") / 7, (["dp", "head", ...], ["dp", "head", ...]), {0: "dp"},
             axis_resources={"dp": "dp"})
plain = xmap(lambda x, y: x * y + jax.lax.psum(x, "i"), (["i", ...], [None, "j"]), ["j", "i", ...])


def numbers(*shape):
    return (np.arange(np.prod(shape)) * 37 % 17 / 16 - 0.5).astype(np.float32).reshape(shape)


def run():
    params = {"up": numbers(2, 6, 8), "down": numbers(2, 8, 6), "bias": numbers(8, 2)}
    with Mesh(np.array(jax.devices()).reshape(4, 2), ("dp", "mp")) as mesh:
        losses = []
        for _ in range(3):
            loss, params = step(params, numbers(4, 5, 6))
            losses.append(np.asarray(loss))
        scores = heads(numbers(4, 3, 5, 2), numbers(4, 3, 5, 2))
        sizes = np.int32([thread_resources.env.shape["dp"], mesh.shape["mp"]])
    params = jax.tree_util.tree_map(np.asarray, params)
    return losses, params, np.asarray(scores), plain(numbers(3, 2), numbers(2, 4)), sizes
'''


pytestmark = pytest.mark.usefixtures("helpers")


@pytest.fixture(scope="module")
def expected():
    with legacy.installed():
        return run(PROGRAM)


@pytest.mark.filterwarnings("ignore:.*with mesh:DeprecationWarning", "ignore:Some donated buffers")
def test_the_migrated_program_needs_jax_alone_and_agrees(tmp_path, expected):
    found = migrated(tmp_path, PROGRAM)
    assert (found.decided, found.undecided) == (3, [])
    assert "xmap(" not in found.migrated
    assert "experimental" not in found.migrated
    got = run(found.migrated)
    assert len(got) == len(expected) == 9
    for ours, theirs in zip(got, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-6)
    broken = found.migrated.replace('jax.lax.pmean(gradient, "batch")', "gradient")
    assert not np.allclose(run(broken)[2], expected[2], rtol=1e-3)


def test_the_comments_say_what_a_reader_must_know(tmp_path):
    text = " ".join(migrated(tmp_path, PROGRAM).migrated.replace("#", " ").split())
    assert '"shard" on "mp", "batch" on "dp". An axis is as long as its mesh axis, or a multiple of it.' in text
    assert "check_vma=False keeps xmap's transposes for the gradient at old.py:18: " in text
    assert "psum over 'shard' (old.py:10) to psum [with check_vma=True: no collective" in text
    assert "out_axes: no 'head'; vmap raises if the result varies along it." in text
    assert "out_axes[0]: no 'shard', 'batch'; of a result that varies along it, index 0's is taken." in text
    assert "out_axes[1]['bias'], out_axes[1]['down'], out_axes[1]['up']: no 'batch'; of a result" in text
    assert "check_vma: no gradient is seen inside" in text


def test_axes_keep_their_names_and_mesh_axes(tmp_path):
    source = "from jax.experimental.maps import xmap\nf = xmap(g, ['x', ...], ['x', ...], axis_resources={'x': 'x'})\n"
    text = migrated(tmp_path, source).migrated
    assert 'in_specs=P("x"),' in text
    assert 'axes={"x": "x"}' in text
    assert "from shard_map_helpers import shard_map_over_mesh\n" in text


def test_a_file_with_another_p_gets_the_whole_name(tmp_path):
    source = "from jax.experimental.maps import xmap\nP = 8\nf = xmap(g, ['x'], ['x'], axis_resources={'x': 'x'})\n"
    text = migrated(tmp_path, source).migrated
    assert 'in_specs=PartitionSpec("x"),' in text
    assert "from jax.sharding import PartitionSpec\n" in text


def test_resources_of_an_unknown_axis_are_left_out(tmp_path):
    source = (
        "from jax.experimental.maps import xmap\nf = xmap(g, ['x', ...], [...], axis_resources={'x': 'x', 'y': 'z'})\n"
    )
    text = migrated(tmp_path, source).migrated
    assert "nothing defines 'y': left out" in text
    assert "of a result that varies along it, index 0's is taken" in text


@pytest.mark.parametrize(
    ("call", "reason"),
    [
        ("xmap(f, *specs)", "its arguments are passed on with * or **"),
        ("xmap(f, ['i', ...])", "it has no out_axes"),
        ("xmap(f, specs(), ['i'])", "in_axes has specs(), which is not written out"),
        ("xmap(f, ['i'], ['i'], axis_resources=resources)", "axis_resources is resources, which is not written out"),
        ("xmap(f, ['i'], ['i'], axis_resources={'i': SerialLoop(4)})", "'i' runs in SerialLoop(4): write jax.lax.map"),
        ("xmap(f, ['i', 'j'], ['i'], axis_resources={'i': 'x', 'j': 'x'})", "'i' and 'j' both lie on 'x'"),
        ("xmap(f, ['i'], ['j'])", "out_axes has 'j', which nothing defines"),
        ("xmap(f, 'i', ['i'])", "in_axes is 'i'; a spec is a list"),
        ("partial(xmap, in_axes=['i'])", "partial(xmap, ...) gets its function elsewhere"),
    ],
)
def test_what_cannot_be_decided_is_listed_and_stays(tmp_path, call, reason):
    source = f"from functools import partial\nfrom jax.experimental.maps import SerialLoop, xmap\n\ng = {call}\n"
    found = migrated(tmp_path, source)
    assert found.migrated == source
    (line,) = found.undecided
    assert line.startswith(f"{tmp_path / 'old.py'}:4: {reason}")


def test_an_xmap_in_pjit_needs_the_names_of_its_mesh(tmp_path):
    source = (
        f"{HEAD}from jax.experimental.pjit import pjit\nf = pjit(xmap(g, ['i'], ['i'], axis_resources={{'i': 'x'}}))\n"
    )
    found = migrated(tmp_path, source)
    assert found.decided == 0
    assert "3: jax rejects other axis names inside of pjit" in found.undecided[0]
    assert migrated(tmp_path, source.replace("'i'", "'x'")).decided == 1


MESHES = """\
    from jax.experimental import maps
    from jax.experimental.maps import ResourceEnv, thread_resources, xmap
    import numpy

    def inside(devices):
        with maps.mesh(devices, ("x",)):
            thread_resources.env = ResourceEnv(maps.Mesh(devices, ("y",)), ())
            return maps.thread_resources.env.physical_mesh, thread_resources.env.shape["y"]

    def outside():
        thread_resources.env = ResourceEnv(maps.Mesh(numpy.empty((), object), ()), ())

    f = xmap(lambda x: 2 * x, ["i", ...], ["i", ...])
"""


def test_how_a_mesh_comes_into_scope(tmp_path):
    found = migrated(tmp_path, textwrap.dedent(MESHES))
    assert found.undecided == []
    text = found.migrated
    for line in (
        'with mesh_scope(Mesh(devices, ("x",))):',
        'set_mesh(Mesh(devices, ("y",)))',
        'return mesh_in_scope(), mesh_in_scope().shape["y"]',
        "set_mesh(Mesh(numpy.empty((), object), ()))",
        "f = jax.jit(jax.vmap((lambda x: 2 * x), in_axes=0, out_axes=0, axis_name='i'))",
        "from jax.sharding import Mesh",
    ):
        assert line in text
    assert "maps" not in text
    ast.parse(text)


def test_a_mesh_with_a_name_and_one_beside_an_xmap_that_stays(tmp_path):
    source = (
        "from jax.experimental.maps import Mesh, xmap\n"
        "mesh = Mesh(devices, ('x',))\n"
        "with mesh:\n    f = xmap(g, ['i'], ['i'], axis_resources={'i': 'x'})\n"
    )
    assert "with mesh_scope(mesh):" in migrated(tmp_path, source).migrated
    found = migrated(tmp_path, source + "with Mesh(devices, ('y',)):\n    xmap(f, *specs)\n")
    assert "with mesh as mesh_of_xmaps, mesh_scope(mesh_of_xmaps):" in found.migrated
    assert "with Mesh(devices, ('y',)) as mesh_of_xmaps, mesh_scope(mesh_of_xmaps):" in found.migrated
    assert "from jax.experimental.maps import Mesh, xmap\n" in found.migrated


CALL = "xmap(g, ['i'], ['i'], axis_resources={'i': 'x'})"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        (f"{HEAD}f, h = {CALL}, {CALL}\n", ["f, h = shard_map_over_mesh(", "# axis_resources: "]),
        (f"{HEAD}f = (\n    {CALL})\n", ["# axis_resources: ", "f = (\n    shard_map_over_mesh("]),
        (
            f"{HEAD}with Mesh(d, n): y = {CALL}(v)\n",
            ["with mesh_scope(Mesh(d, n)): y = shard_map_over_mesh(", "# axis_"],
        ),
        (f"{HEAD}with Mesh(d, n) as self.mesh:\n    y = {CALL}(v)\n", ["with Mesh(d, n) as self.mesh, mesh_scope("]),
        (f"{HEAD}with Mesh(devices=d, axis_names=n):\n    y = {CALL}(v)\n", ["mesh_scope(Mesh(devices=d, "]),
        (f"{HEAD}def a(): pass\n\f\nf = {CALL}\n", ["\f\n", "\nf = shard_map_over_mesh("]),
        (f"try:\n    {HEAD}except ImportError:\n    raise\nf = {CALL}\n", ["try:\n    pass\nexcept ImportError:"]),
    ],
)
def test_what_lies_on_one_line_or_in_one_block_stays_python(tmp_path, source, words):
    found = migrated(tmp_path, source)
    assert found.undecided == []
    assert "experimental" not in found.migrated
    for each in words:
        assert each in found.migrated
    ast.parse(found.migrated)


@pytest.mark.parametrize(
    "hidden",
    [
        "def make(axes):\n    return CALL\n",
        "def make():\n    for axes in every:\n        CALL\n",
        "def make():\n    axes, b = both\n    return CALL\n",
        "made = [CALL for axes in every]\n",
    ],
)
def test_a_name_that_an_inner_scope_binds_is_not_the_outer_one(tmp_path, hidden):
    call = "xmap(f, axes, ['i', ...])"
    source = f"{HEAD}axes = ['i', ...]\n"
    assert migrated(tmp_path, f"{source}f = {call}\n").decided == 1
    found = migrated(tmp_path, source + hidden.replace("CALL", call))
    assert found.decided == 0
    assert "in_axes has axes, which is not written out" in found.undecided[0]


@pytest.mark.parametrize(
    ("before", "specs"),
    [
        ("axes = (['i', ...],) * 2", "axes"),
        ("axes = [['i', ...]] + [['i']]", "axes"),
        ("axes = dict(a=['i', ...])", "(axes,)"),
        ("class A:\n  def __init__(self):\n    self.axes = ['i', ...]", "(self.axes,)"),
    ],
)
def test_specs_may_be_held_in_variables(tmp_path, before, specs):
    call = f"xmap(f, {specs}, ['i', ...], axis_resources={{'i': 'x'}})"
    source = f"{HEAD}{before}\ndef make(self):\n    return {call}\n"
    found = migrated(tmp_path, source)
    assert (found.decided, found.undecided) == (1, [])
    assert 'P("i")' in found.migrated
    assert migrated(tmp_path, f"{source}class B:\n  def g(self):\n    self.axes = axes = 1\n").decided == (
        "self" not in specs
    )


def test_nested_xmaps_over_a_mesh_stay(tmp_path):
    source = (
        "from jax.experimental.maps import xmap\n"
        "def inner(x): return xmap(g, ['i'], ['i'], axis_resources={'i': 'x'})(x)\n"
        "def body(x):\n    return inner(x)\n"
        "outer = xmap(body, ['j', ...], ['j', ...], axis_resources={'j': 'y'})\n"
    )
    found = migrated(tmp_path, source)
    assert [line.partition(": ")[2] for line in found.undecided] == [
        "it is reached by the xmap at old.py:5",
        "its body reaches the xmap at old.py:2: one shard_map over all their mesh axes serves both",
    ]
    assert found.decided == 0


def test_a_name_of_maps_that_stays_keeps_its_import(tmp_path):
    source = textwrap.dedent(MESHES) + "loop = maps.SerialLoop(2)\n"
    found = migrated(tmp_path, source)
    assert [line.partition(": ")[2] for line in found.undecided] == [
        "jax.experimental.maps.SerialLoop has no counterpart"
    ]
    assert "from jax.experimental import maps\n" in found.migrated
    assert "thread_resources" not in found.migrated


def test_a_file_that_calls_no_xmap_by_its_name_stays(tmp_path):
    source = "from jax.experimental.maps import xmap\napply = xmap\nf = apply(g, in_axes=['i'], out_axes=['i'])\n"
    found = migrated(tmp_path, source)
    assert found.migrated == source
    assert [line.partition(".py:")[2][:30] for line in found.undecided] == ["1: it imports jax.experimental"]
    assert not migrated(tmp_path, "import jax\n").undecided


def test_the_command_prints_a_patch_and_says_what_stays(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "old.py").write_text(PROGRAM)
    (tmp_path / "stays.py").write_text("from jax.experimental.maps import xmap\nf = xmap(g, *specs)\n")
    assert main(["legacy", "--migrate", "old.py"]) == 0
    out, err = capsys.readouterr()
    assert out.startswith("--- a/old.py\n+++ b/old.py\n@@ ")
    lines = [line for line in err.splitlines() if "files read" not in line]  # those come every five seconds
    assert lines == ["3 xmaps rewritten, 1 of 1 file changed, 0 places left"]
    assert main(["legacy", "--migrate", "stays.py"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[1] == "  stays.py:2: its arguments are passed on with * or **; write them out"


def test_patch_applies_to_an_absolute_path_without_newline(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    file = tmp_path / "old.py"
    file.write_text(f"{HEAD}f = xmap(g, ['i'], ['i'])\nx = 1")
    expected = migrate_file(file).migrated
    assert main(["legacy", "--migrate", str(file)]) == 0
    subprocess.run(["git", "apply", "-"], input=capsys.readouterr().out, text=True, check=True)
    assert file.read_text() == expected


def test_missing_path_is_an_error(capsys):
    assert main(["legacy", "--migrate", "nowhere.py"]) == 2
    assert "nowhere.py: no such file or folder" in capsys.readouterr().err


@pytest.mark.parametrize(("content", "words"), [("print 'x'\n", "not Python 3: "), ("x = '\udce9'\n", "can't decode")])
def test_unreadable_file_is_listed_and_the_rest_migrates(tmp_path, monkeypatch, capsys, content, words):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "two.py").write_bytes(content.encode(errors="surrogateescape"))
    (tmp_path / "code" / "three.py").write_text("import jax\njax.tree_map(f, x)\n")
    assert main(["legacy", "--check", "code"]) == 1
    assert "not read" in capsys.readouterr().out
    assert main(["legacy", "--migrate", "code"]) == 1
    out, err = capsys.readouterr()
    assert "+jax.tree.map(f, x)" in out
    assert "1 of 2 files changed, 1 place left" in err
    assert err.splitlines()[-1].startswith("  code/two.py: not read: ")
    assert words in err


@pytest.mark.parametrize(
    "use",
    [
        "maybe = pjit if wide else noop",
        "make = pjit\nf = make(g, in_axis_resources=None)",
        "f = wrap(pjit, g)",
        "f = pjit(g, *resources)",
        "f = pjit(g, **resources)",
        "f = map(partial(pjit, g), x)",
        "class A:\n  transform = staticmethod(pjit)",
        "f = pjit(wrap(pjit), in_axis_resources=None)",
    ],
)
def test_pjit_as_a_value_is_listed(tmp_path, use):
    found = migrated(tmp_path, f"from functools import partial\nfrom jax.experimental.pjit import pjit\n{use}\n")
    line = 4 if use.startswith("class") else 3
    assert [text.partition(" stays")[0] for text in found.undecided] == [f"{tmp_path / 'old.py'}:{line}: pjit"]
    assert "from jax.experimental.pjit import pjit" in found.migrated


@pytest.mark.parametrize(
    "use", ["f = pjit(g)", "@pjit\ndef f(x): return x", "@partial(pjit, donate_argnums=0)\ndef f(x): x"]
)
def test_called_pjit_becomes_jit(tmp_path, use):
    found = migrated(tmp_path, f"from functools import partial\nfrom jax.experimental.pjit import pjit\n{use}\n")
    assert found.undecided == []
    assert "pjit" not in found.migrated
    assert "jax.jit" in found.migrated
