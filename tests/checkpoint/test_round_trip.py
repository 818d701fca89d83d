"""What is saved on one mesh comes back bitwise on any other, by shardformer and by plain numpy."""

import itertools
import os
import pickle
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P

from shardformer import checkpoint
from shardformer.checkpoint import names
from shardformer.errors import RunError

ROOT = Path(__file__).parents[2]


class State(NamedTuple):
    params: dict
    optimizer: tuple
    step: jax.Array


def make_mesh(dp: int, mp: int) -> Mesh:
    return Mesh(np.array(jax.devices()[: dp * mp]).reshape(dp, mp), ("dp", "mp"))


def place(mesh: Mesh, leaf) -> NamedSharding:
    return NamedSharding(mesh, {2: P("mp"), 3: P(None, "mp", "dp")}.get(leaf.ndim, P()))


def like(state, sharding_of):
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding_of(leaf)), state)


def bits(tree) -> dict:
    return {name: (leaf.dtype, leaf.shape, np.asarray(leaf).tobytes()) for name, leaf in names.flatten(tree).items()}


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
    }
    trained = {"embed": params["transformer/embed"], "q": params["transformer/layers"]["q"]}
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3, mu_dtype=jnp.bfloat16)).init(trained)
    optimizer = jax.tree.map(lambda leaf: random.normal(size=leaf.shape).astype(leaf.dtype), optimizer)
    state = State(params, optimizer, np.int32(40))
    return jax.tree.map(lambda leaf: jax.device_put(leaf, place(mesh, leaf)), state)


@pytest.fixture(scope="module")
def saved(state, tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "checkpoints" / "tiny"
    return checkpoint.save(out, 40, state, {"config.json": '{"who": "Roméo"}'})


def test_folder_has_the_promised_form(saved, state):
    assert saved.name == "step_00000040"
    assert {path.name for path in saved.iterdir()} == {"arrays.npy", "tree.pkl", "config.json"}
    assert checkpoint.document(saved, "config.json") == '{"who": "Roméo"}'
    tree = pickle.loads((saved / "tree.pkl").read_bytes())
    assert list(tree) == list(names.flatten(state))
    assert tree["params/transformer/layers/q"] == ("bfloat16", (3, 8, 16))


@pytest.mark.parametrize(("dp", "mp"), [(4, 2), (2, 4), (8, 1), (1, 8)])
def test_any_mesh_gets_the_same_bits_and_only_its_slices(saved, state, dp, mp):
    mesh = make_mesh(dp, mp)
    restored = checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    assert bits(restored) == bits(state)
    assert jax.tree.structure(restored) == jax.tree.structure(state)
    for leaf in jax.tree.leaves(restored):
        assert leaf.sharding == place(mesh, leaf)
        assert {shard.data.shape for shard in leaf.addressable_shards} == {leaf.sharding.shard_shape(leaf.shape)}


def test_one_device(saved, state):
    restored = checkpoint.restore(saved, like(state, lambda leaf: SingleDeviceSharding(jax.devices()[0])))
    assert bits(restored) == bits(state)


def test_bits_see_the_sign_of_a_zero():
    assert bits({"x": jnp.array([0.0])}) != bits({"x": jnp.array([-0.0])})


def test_restored_arrays_own_their_memory(saved, state, monkeypatch):
    """On the CPU an Array may lie in the numpy buffer it was made from; the step writes into what is donated to it."""
    slices = []
    make = jax.make_array_from_callback

    def watched(shape, sharding, callback):
        return make(shape, sharding, lambda index: slices.append(callback(index)) or slices[-1])

    monkeypatch.setattr("jax.make_array_from_callback", watched)
    mesh = make_mesh(4, 2)
    checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    assert len(slices) >= len(jax.tree.leaves(state))
    assert all(part.flags.owndata and part.flags.writeable for part in slices)
    assert not any(np.shares_memory(one, other) for one, other in itertools.pairwise(slices))


def test_a_donated_state_leaves_the_file_alone(saved, state):
    before = (saved / "arrays.npy").read_bytes()
    mesh = make_mesh(4, 2)
    restored = checkpoint.restore(saved, like(state, lambda leaf: place(mesh, leaf)))
    double = jax.jit(lambda params: jax.tree.map(lambda leaf: leaf + leaf, params), donate_argnums=0)
    doubled = double(double({"tokens": restored.params["transformer/embed"]["tokens"], "step": restored.step}))
    tokens = np.asarray(state.params["transformer/embed"]["tokens"])
    for shard in doubled["tokens"].addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), 4 * tokens[shard.index])
    for shard in doubled["step"].addressable_shards:  # replicated: eight copies, not one that was doubled eight times
        assert int(shard.data) == 160
    assert (saved / "arrays.npy").read_bytes() == before


def test_a_part_of_the_state_can_be_left_out(saved, state):
    parts = {"params": state.params, "step": state.step}
    wanted = like(parts, lambda leaf: SingleDeviceSharding(jax.devices()[0]))
    assert bits(checkpoint.restore(saved, wanted, without=("optimizer",))) == bits(parts)
    with pytest.raises(RunError, match=r"leaf 'optimizer/1/0/count' was not expected"):
        checkpoint.restore(saved, wanted)


@pytest.mark.parametrize(
    "leaf", [lambda: jax.random.key(0), lambda: 3, lambda: np.ones(2)], ids=["key", "int", "numpy"]
)
def test_only_plain_arrays_are_saved(tmp_path, leaf):
    with pytest.raises(TypeError, match=r"leaf 'dropout' is no plain jax.Array"):
        checkpoint.save(tmp_path, 1, {"dropout": leaf()}, {})
    assert not list(tmp_path.iterdir())


def test_readme_reads_it_without_shardformer(saved, state, monkeypatch):
    readme = (ROOT / "checkpoints" / "README.md").read_text()
    (snippet,) = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    monkeypatch.chdir(saved.parents[2])
    found = {}
    exec(snippet, found)
    expected = names.flatten(state)
    assert list(found["leaves"]) == list(expected)
    for name, (dtype, array) in found["leaves"].items():
        assert dtype == expected[name].dtype.name
        assert array.tobytes() == np.asarray(expected[name]).tobytes()


TWO_PROCESSES = """
import errno, os, sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import NamedSharding, PartitionSpec as P
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
process, port, out = int(sys.argv[1]), sys.argv[2], sys.argv[3]
jax.distributed.initialize(f"localhost:{port}", num_processes=2, process_id=process)
from shardformer import checkpoint
from shardformer.errors import RunError

mesh = jax.make_mesh((2, 2), ("dp", "mp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
data = {"split": np.arange(32, dtype=np.float32).reshape(8, 4), "whole": np.arange(3, dtype=np.int32)}
spec = {"split": P("dp", "mp"), "whole": P()}
like = {k: jax.ShapeDtypeStruct(v.shape, v.dtype, sharding=NamedSharding(mesh, spec[k])) for k, v in data.items()}
state = {k: jax.make_array_from_callback(v.shape, like[k].sharding, lambda i, v=v: v[i]) for k, v in data.items()}
folder = checkpoint.save(out, 1, state, {})
for name, leaf in checkpoint.restore(folder, like).items():
    for shard in leaf.addressable_shards:
        np.testing.assert_array_equal(np.asarray(shard.data), data[name][shard.index])

def full(*_):
    raise OSError(errno.ENOSPC, "No space left on device")

os.fsync = full
try:
    checkpoint.save(out, 2, state, {})
except RunError as error:
    print(f"refused: {error}")
"""


def test_two_processes_write_one_checkpoint_and_fail_as_one(tmp_path):
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    runs = [
        subprocess.Popen([sys.executable, "-c", TWO_PROCESSES, str(process), str(port), str(tmp_path)],
                         env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for process in range(2)
    ]  # fmt: skip
    try:
        ends = [run.communicate(timeout=120) for run in runs]
    finally:
        for run in runs:
            run.kill()
    assert [run.returncode for run in runs] == [0, 0], ends
    assert "No space left" in ends[0][0]
    assert "process 0 could not write" in ends[1][0]
    assert [path.name for path in tmp_path.iterdir()] == ["step_00000001"]
    assert len(pickle.loads((tmp_path / "step_00000001" / "tree.pkl").read_bytes())) == 2
