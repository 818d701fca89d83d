"""The optimizer's state in the host's memory: the same results, a bad step, and checkpoints."""

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.analysis import traced
from shardformer.config.names import HOST
from shardformer.training import offloaded_update
from tests import shared

MASTERS = {"mesh": "2x1", "layers": 2, "dtype": "bfloat16", "param_dtype": "bfloat16", "lr_rules": "up=frozen"}
CASES = {
    "zero": {"mesh": "2x2", "zero": 3, "ema": 0.9},
    "masters": MASTERS,
}
BAD = 1  # the number of a step that is not applied


def train(**options):
    """Returns the trainer, the state after three steps, the second of which is bad, and their metrics."""
    trainer = shared.trainer(**options)
    state, rows = trainer.init(), []
    for step, number in enumerate((0, BAD + 7, 1)):
        state, metrics = trainer.step(state, shared.batch(step), number)
        rows.append(np.asarray(metrics))
    return trainer, state, np.stack(rows)


@pytest.fixture(scope="module", params=["zero", pytest.param("masters", marks=pytest.mark.slow)])
def options(request):
    return CASES[request.param]


@pytest.fixture(scope="module")
def offloaded(options):
    """Returns what `train` does with offload."""
    return train(offload="optimizer", **options)


def differing(a, b) -> list[str]:
    """Returns the names of the arrays that are not bitwise equal."""
    pairs = zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True)
    return [jax.tree_util.keystr(path) for (path, x), y in pairs if not np.array_equal(np.asarray(x), np.asarray(y))]


@pytest.mark.slow
def test_state_is_that_without_offload(options, offloaded):
    """Bitwise with the compiler's default options (by hand); those of tests contract other products and sums."""
    (_, plain, plain_rows), (_, state, rows) = train(**options), offloaded
    assert int(state.step) == 2
    for (path, a), b in zip(jax.tree.leaves_with_path(plain), jax.tree.leaves(state), strict=True):
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        assert np.abs(a - b).max(initial=0) <= 1e-5 * np.abs(a).max(initial=0), jax.tree_util.keystr(path)
    np.testing.assert_allclose(rows, plain_rows, rtol=3e-6)  # the update's norm is summed layer by layer


def assert_matrices_are_in_host_memory(state):
    for path, leaf in jax.tree.leaves_with_path((state.optimizer, state.masters)):
        assert (leaf.sharding.memory_kind == HOST) == offloaded_update.is_offloaded(path, leaf)
    assert all(leaf.sharding.memory_kind != HOST for leaf in jax.tree.leaves(state.params))
    assert any(leaf.sharding.memory_kind == HOST for leaf in jax.tree.leaves(state.optimizer))


def test_matrices_are_in_host_memory_between_steps(offloaded):
    assert_matrices_are_in_host_memory(offloaded[1])


@pytest.mark.parametrize("case", CASES)
def test_matrices_have_the_sharding_of_host_memory(case):
    state = traced.make_trainer(shared.tiny(offload="optimizer", **CASES[case])).abstract
    assert_matrices_are_in_host_memory(state)
    assert all(leaf.sharding.memory_kind == HOST for leaf in jax.tree.leaves(state.masters))


def test_checkpoint_restores_with_and_without_offload(options, offloaded, tmp_path):
    plain, (trainer, state, _) = shared.trainer(**options), offloaded
    path = checkpoint.save(tmp_path, 2, state, {})
    restored = checkpoint.restore(path, trainer.abstract)
    assert differing(state, restored) == []
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(lambda leaf: leaf.sharding, state)
    assert differing(state, checkpoint.restore(path, plain.abstract)) == []


@pytest.mark.slow
def test_bad_step_that_is_applied_is_noticed(broken):
    """The negative twin: without the choice, the state is that of another run."""
    broken(offloaded_update, "_choose", lambda applied, new, old: new)
    options = {"mesh": "1x1", "layers": 1}
    plain, offloaded = train(**options), train(offload="optimizer", **options)
    mu = [np.asarray(run[1].optimizer[1].mu["transformer/layers"]["q"]) for run in (plain, offloaded)]
    assert np.abs(mu[0] - mu[1]).max() > 1e-2 * np.abs(mu[0]).max()
