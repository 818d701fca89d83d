"""The seed's checkpoints are read without running anything, written byte for byte, and go on under legacy."""

import contextlib
import io
import pickle
import random
import shutil
import subprocess

import jax
import numpy as np
import optax
import pytest

from shardformer import legacy
from shardformer.convert import seed, seed_pickles
from shardformer.errors import RunError, UsageError
from tests.asserts import relative
from tests.convert.conftest import GOLDENS
from tests.legacy.record_notebook import Notebook

RECORDED = GOLDENS / "seed"
FILES = (seed.ARRAYS, seed.TREE)


@pytest.fixture
def folder(tmp_path):
    """A copy to damage."""
    return shutil.copytree(RECORDED, tmp_path / "copy")


def test_read_and_written_files_are_bitwise_the_same(tmp_path):
    seed.write_checkpoint(tmp_path, seed.read_checkpoint(RECORDED))
    for name in FILES:
        assert (tmp_path / name).read_bytes() == (RECORDED / name).read_bytes()


def test_the_tree_is_what_the_notebook_had():
    state = seed.read_checkpoint(RECORDED)
    moments, nothing = state["opt_state"]
    assert sorted(state) == ["opt_state", "params", "step"]
    assert (type(moments).__name__, type(nothing).__name__) == ("ScaleByAdamState", "EmptyState")
    assert type(state["params"]).__name__ == "FlatMapping"
    assert jax.tree.structure(moments.mu) == jax.tree.structure(state["params"])
    assert {leaf.shape[0] for leaf in jax.tree.leaves(state)} == {2}  # shards
    np.testing.assert_array_equal(state["step"], [1, 1])


@pytest.mark.slow
def test_it_trains_on_under_legacy(tmp_path, monkeypatch):
    """The losses of the first step after the checkpoint equal the losses of jax 0.4.13."""
    notebook, expected = Notebook(), np.load(RECORDED / "next_losses.npy")
    notebook.edit("44", "'d_model' : 16", "'d_model' : 8")
    notebook.edit("44", "'n_vocab': 32", "'n_vocab': 8")
    notebook.edit("44", "maxval=32", "maxval=8")
    monkeypatch.chdir(tmp_path)
    with (
        jax.numpy_dtype_promotion("standard"),
        jax.numpy_rank_promotion("allow"),
        legacy.installed(legacy_random=True),
        contextlib.redirect_stdout(io.StringIO()),
    ):
        notebook.run("2", "3", "7", "11", "14", "16", "17", "44")
        notebook.namespace["state"] = seed.read_checkpoint(RECORDED)
        notebook.run("49")
        state = notebook.namespace["state"]
        assert relative(notebook.namespace["loss"], expected) < 1e-6
        seed.write_checkpoint(tmp_path / "again", state)
        assert jax.tree.all(
            jax.tree.map(
                np.array_equal, jax.tree.leaves(seed.read_checkpoint(tmp_path / "again")), jax.tree.leaves(state)
            )
        )


def test_bytes_of_python_3_14_come_back(tmp_path):
    """Its pickles have protocol 5, which says little else here."""
    pickled = (RECORDED / seed.TREE).read_bytes().replace(b"\x80\x04", b"\x80\x05", 1)
    shutil.copytree(RECORDED, tmp_path / "newer")
    (tmp_path / "newer" / seed.TREE).write_bytes(pickled)
    seed.write_checkpoint(tmp_path / "again", seed.read_checkpoint(tmp_path / "newer"), protocol=5)
    assert (tmp_path / "again" / seed.TREE).read_bytes() == pickled


def _tree(rng, depth=5):
    kind = rng.randrange(6) if depth else 0
    items = [_tree(rng, depth - 1) for _ in range(rng.choice([0, 1, 2, 3, 4, 7]))] if kind > 1 else []
    if kind == 5:
        return optax.ScaleByAdamState(0, {"w": 0}, tuple(items))
    if kind == 4:
        return {rng.choice(["w", "é", "x" * 300, str(rng.random())]): item for item in items}
    return [0, None, items, tuple(items)][kind]


def test_pickles_are_python_s_own():
    rng = random.Random(0)
    trees = [_tree(rng) for _ in range(200)]
    trees += [{str(i): 0 for i in range(n)} for n in (999, 1000, 2001)] + [[0] * n for n in (999, 1000, 2001)]
    trees += [{f"layer_{i}/~/linear": {"w": 0, "b": 0} for i in range(4000)}]  # of two or more frames
    for tree in trees:
        for protocol in (4, 5):
            pickled = pickle.dumps(tree, protocol)
            assert seed_pickles.dumps(tree, protocol) == pickled
            assert seed_pickles.loads(pickled) == tree
    assert seed_pickles.loads(pickle.dumps(trees[:10], 2)) == trees[:10]


class Hostile:
    def __reduce__(self):
        return subprocess.call, (["touch", "ran"],)


@pytest.mark.parametrize(
    ("pickled", "message"),
    [
        (pickle.dumps({"step": Hostile()}), "it asks for subprocess.call"),
        (pickle.dumps(np.zeros(3)), "it asks for numpy"),
        (pickle.dumps(np.float32), "it asks for numpy.float32"),
        (pickle.dumps(optax.adam), "it asks for optax._src.alias.adam"),
        (b"\x80\x02coptax\nbuiltins.eval\n.", "it asks for optax.builtins.eval"),
        (pickle.dumps({"step": 1}), "it has the opcode BININT1 (1)"),
        (pickle.dumps({0: 0}), "it has a int where only a string can be"),
        (b"\x80\x04]\x94" + b"h\x00h\x00\x86\x94" * 40 + b".", "it uses one container twice"),
        (b"\x80\x04]r\xff\xff\xff\xff.", "has 83 arrays, and tree.pkl 0 leaves"),
        (b"\x80\x04" + b"]" * 100_000 + b"a" * 99_999 + b".", ""),
        (b"\x80\x04}", "pickle exhausted before seeing STOP"),
        (pickle.dumps({}) + b"x", "1 bytes follow its end"),
        (b"{}", "it begins with b'{}'"),
        (b"", "it begins with b''"),
    ],
)
def test_no_other_pickle_is_opened(folder, tmp_path, monkeypatch, pickled, message):
    monkeypatch.chdir(tmp_path)
    (folder / seed.TREE).write_bytes(pickled)
    with pytest.raises(RunError) as error:
        seed.read_checkpoint(folder)
    assert str(folder) in str(error.value)
    assert message in str(error.value)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-1], "takes 8 bytes, and 7 are left"),
        (lambda content: content[:4000], "is damaged at byte"),
        (lambda content: content + b"x", "is damaged at byte"),
        (lambda content: content + content[:200], "is damaged at byte"),
        (lambda content: content.replace(b"(2,), }", b"(2222222222,)}", 1), "takes"),
        (lambda content: content.replace(b"'<f4'", b"'|O'  ", 1), "is damaged at byte"),
        (lambda content: b"", "has 0 arrays, and tree.pkl 83 leaves"),
    ],
)
def test_damaged_arrays_are_named(folder, damage, message):
    path = folder / seed.ARRAYS
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(RunError) as error:
        seed.read_checkpoint(folder)
    assert str(path) in str(error.value)
    assert message in str(error.value)


def test_what_no_run_has_is_told_from_the_tree_alone(folder):
    """The arrays may be of many GB."""
    (folder / seed.ARRAYS).write_bytes(b"")
    with pytest.raises(UsageError, match=r"linear_3/w and 1 more: x \+ attention"):
        seed.refuse_to_convert(folder)
