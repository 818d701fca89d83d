"""A checkpoint of one mesh is restored bitwise on any other, by shardformer and by plain numpy."""

import contextlib
import dataclasses
import itertools
import json
import os
import pickle
import re
import resource
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import array_files, documents, manifest
from shardformer.errors import RunError
from shardformer.storage import bucket
from tests.checkpoint import places
from tests.checkpoint.cases import bits, here, like, make_mesh, place, plain
from tests.checkpoint.places import object_of
from tests.surroundings import before_call

ROOT = Path(__file__).parents[2]


class State(NamedTuple):
    params: dict
    optimizer: tuple
    step: jax.Array


@pytest.fixture(scope="module")
def state():
    mesh, random = make_mesh(4, 2), np.random.default_rng(0)
    params = {
        "transformer/embed": {"tokens": random.normal(size=(16, 8)).astype(np.float32)},
        "transformer/layers": {
            "gain": np.array([0.0, -0.0, np.nan, np.inf, 1e-42], np.float32),
            "mask": np.array([True, False, True]),  # three bytes: what follows in the file is not aligned
            "q": random.normal(size=(3, 8, 16)).astype(jnp.bfloat16),
        },
        "transformer/none": {"empty": np.zeros((0, 8), np.float32)},
        "dropout": {"key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 4)},
    }
    trained = {"embed": params["transformer/embed"], "q": params["transformer/layers"]["q"]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)).init(trained)
    optimizer = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), optimizer)
    state = State(params, optimizer, np.int32(40))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, place(mesh, leaf)), state)


@pytest.fixture(scope="module")
def saved(state, kind, tmp_path_factory):
    out = places.new_place(kind, tmp_path_factory.mktemp("run"))
    return checkpoint.save(out, 40, state, {"config.json": '{"who": "Roméo"}'})


@pytest.fixture(scope="module")
def saved_on_disk(state, tmp_path_factory):
    return checkpoint.save(tmp_path_factory.mktemp("run") / "checkpoints" / "tiny", 40, state, {})


def test_folder_has_the_promised_form(saved, state):
    assert saved.name == "step_00000040"
    names = {"arrays.npy", "tree.pkl", "manifest.json", "config.json"}
    if isinstance(saved, Path):
        assert {path.name for path in saved.iterdir()} == names
    else:
        objects = {object_of(saved, name).key.removeprefix(f"{saved.key}/") for name in names}
        assert set(bucket.list_objects(saved)) == objects
    assert checkpoint.read_document(saved, "config.json") == '{"who": "Roméo"}'
    tree = pickle.loads(object_of(saved, "tree.pkl").read_bytes())
    assert list(tree) == list(manifest.flatten(state))
    assert tree["params/transformer/layers/q"] == ("bfloat16", (3, 8, 16))
    stored = json.loads((saved / "manifest.json").read_bytes())
    assert stored["format"] == 2
    assert list(stored["leaves"]) == list(tree)
    q = stored["leaves"]["params/transformer/layers/q"]
    assert (q["dtype"], q["shape"], q["spec"]) == ("bfloat16", [3, 8, 16], [None, "mp", "dp"])
    assert [piece["index"] for piece in q["pieces"]] == [
        [[0, 3], [4 * mp, 4 * mp + 4], [4 * dp, 4 * dp + 4]] for dp in range(4) for mp in range(2)
    ]
    assert sum(piece["bytes"] for leaf in stored["leaves"].values() for piece in leaf["pieces"]) == (
        len(object_of(saved, "arrays.npy").read_bytes())
    )


@pytest.mark.parametrize(("dp", "mp"), [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_any_mesh_gets_the_same_bits_and_only_its_slices(saved, state, dp, mp):
    mesh = make_mesh(dp, mp)
    restored = checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding.is_equivalent_to(place(mesh, leaf), leaf.ndim)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {leaf.sharding.shard_shape(leaf.shape)}


def test_one_device(saved, state):
    restored = checkpoint.restore(saved, like(state, lambda leaf: here()))
    assert bits(restored) == bits(state)


def test_bits_see_the_sign_of_a_zero():
    assert bits({"x": jnp.array([0.0])}) != bits({"x": jnp.array([-0.0])})


def test_every_device_gets_memory_of_its_own(saved, state, monkeypatch):
    """On the CPU an Array may lie in the numpy buffer it was made from; the step writes into what is donated to it."""
    slices = []
    before_call(monkeypatch, jax, "device_put", lambda part, device: slices.append(part))
    mesh = make_mesh(4, 2)
    checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    assert len(slices) == 8 * len(jax.tree.leaves(state))
    spans = sorted((part.ctypes.data, part.ctypes.data + part.nbytes) for part in slices if part.nbytes)
    assert all(stop <= start for (_, stop), (start, _) in itertools.pairwise(spans))


def test_snapshot_does_not_share_memory_with_the_next_step(state):
    """The writer reads it while the step runs that the state was donated to."""
    mine = jax.tree.map(jnp.copy, {"q": state.params["transformer/layers"]["q"], "step": state.step})
    before = bits(mine)
    copy = checkpoint.take_snapshot(mine)
    held = [(array, array.tobytes()) for parts in copy.owned.values() for _, array in parts]
    double = jax.jit(lambda tree: jax.tree.map(lambda leaf: leaf + leaf, tree), donate_argnums=0)
    jax.block_until_ready(double(double(mine)))
    assert all(array.tobytes() == bytes for array, bytes in held)
    assert bits(jax.tree.map(jnp.asarray, {"q": state.params["transformer/layers"]["q"], "step": state.step})) == before


def test_donated_state_does_not_change_the_file(saved, state):
    before = object_of(saved, "arrays.npy").read_bytes()
    mesh = make_mesh(4, 2)
    restored = checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    double = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + leaf, params), donate_argnums=0)
    doubled = double(double({"tokens": restored.params["transformer/embed"]["tokens"], "step": restored.step}))
    tokens = np.asarray(state.params["transformer/embed"]["tokens"])
    for shard in doubled["tokens"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), 4 * tokens[shard.index])
    for shard in doubled["step"].addressable_shards:  # replicated: eight copies, not one that was doubled eight times
        assert int(shard.data) == 160
    assert object_of(saved, "arrays.npy").read_bytes() == before


def test_a_part_of_the_state_can_be_left_out(saved, state):
    parts = {"params": state.params, "step": state.step}
    wanted = like(parts, lambda leaf: here())
    assert bits(checkpoint.restore(saved, wanted, ignored=("optimizer",))) == bits(parts)
    for ignored in ((), ("opt",)):
        with pytest.raises(RunError, match=r"leaf 'optimizer/1/0/count' was not expected"):
            checkpoint.restore(saved, wanted, ignored)


def test_many_array_files_are_not_open_at_once(tmp_path):
    """As of a run of 200 processes, where only a few more files may be open than are open now."""
    rows = np.arange(400.0, dtype=np.float32).reshape(200, 2)
    folder = checkpoint.save(tmp_path, 1, {"x": jnp.asarray(rows)}, {})
    stored, pieces, arrays = manifest.read_manifest(folder), [], {}
    (folder / "arrays.npy").unlink()
    for row in range(200):
        path = folder / array_files.file_name(row, 200)
        written, arrays[path.name] = array_files.write_arrays(
            path, [("x", ((row, row + 1), (0, 2)), rows[row : row + 1])]
        )
        pieces += written["x"]
    leaves = {"x": dataclasses.replace(stored.leaves["x"], pieces=tuple(pieces))}
    (folder / "manifest.json").write_text(documents.write_documents(folder, leaves, arrays, {}, ""))
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    free = sorted(set(range(1000)) - set(map(int, os.listdir("/proc/self/fd"))))
    resource.setrlimit(resource.RLIMIT_NOFILE, (free[16], limits[1]))
    try:
        restored = checkpoint.restore(folder, {"x": jax.ShapeDtypeStruct((200, 2), jnp.float32, sharding=here())})
        with contextlib.ExitStack() as stack, pytest.raises(OSError, match="Too many open files"):
            [stack.enter_context(open(folder / name)) for name in arrays]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    np.testing.assert_array_equal(restored["x"], rows)


@pytest.mark.parametrize("leaf", [3, np.ones(2)], ids=["int", "numpy"])
def test_only_arrays_are_saved(out, leaf):
    with pytest.raises(TypeError, match=r"leaf 'dropout' is not a jax.Array"):
        checkpoint.save(out, 1, {"dropout": leaf}, {})
    assert not out.exists()


def test_restored_key_draws_the_same_numbers(saved, state):
    restored = checkpoint.restore(saved, like(state, lambda leaf: here())).params["dropout"]
    for name, key in state.params["dropout"].items():
        found, wanted = (jax.vmap(jax.random.bits)(keys.reshape(-1)) for keys in (restored[name], key))
        np.testing.assert_array_equal(found, wanted)


def test_readme_reads_a_checkpoint_with_numpy(saved_on_disk, state, monkeypatch):
    readme = (ROOT / "checkpoints" / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(saved_on_disk.parents[2])
    assert len(snippet.splitlines()) <= 20
    found = {}
    exec(snippet, found)
    expected = {name: plain(leaf) for name, leaf in manifest.flatten(state).items()}
    assert list(found["leaves"]) == list(expected)
    for name, array in found["leaves"].items():
        value = expected[name]
        value = value.astype(jnp.float32) if value.dtype == jnp.bfloat16 else value
        assert (array.shape, array.tobytes()) == (value.shape, np.asarray(value).tobytes())
