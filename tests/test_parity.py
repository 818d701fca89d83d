"""Sharded equals dense: the matrix of features and meshes, as data, and the table that it gives (`pytest -s`)."""

import jax
import numpy as np
import pytest

from tests import reference, shared

STEPS = 20
F32 = {"loss": 1e-6, "gradient": 1e-5, "after 20 steps": 1e-4}
BF16 = {"loss": 1e-4, "gradient": 5e-2, "after 20 steps": 1e-2}  # rounding of 8 bits, in another order on each mesh

MATRIX = {
    "parallel": {},
    "sequential": {"block": "sequential"},
    "dropout": {"dropout": 0.2},
    "remat": {"remat": True},
    "unrolled": {"scan": False},
    "embed_split=width": {"embed_split": "width", "positions": "learned"},
    "GPT-2": {"block": "sequential", "positions": "learned", "bias": "all", "tied": True, "scan": False},
    "T5, RMSNorm": {"positions": "t5", "norm": "rmsnorm", "bias": "none", "z_loss": 1e-2, "embed_bias": True},
    "everything at once": {
        "block": "sequential", "positions": "learned", "embed_split": "width", "dropout": 0.1, "remat": True,
        "scan": False, "norm": "rmsnorm", "z_loss": 1e-3,
    },
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, GPT-2, dropout": {
        "dtype": "bfloat16", "block": "sequential", "positions": "learned", "dropout": 0.1, "scan": False,
    },
}  # fmt: skip
TABLE = []


@pytest.fixture(scope="module", autouse=True)
def table():
    yield
    lines = [f"{'parity with mesh=1x1':32} {'mesh':>5} {'loss':>9} {'gradient':>9} {'20 steps':>9}"]
    lines += [f"{name:32} {mesh:>5} {loss:9.1e} {grad:9.1e} {late:9.1e}" for name, mesh, loss, grad, late in TABLE]
    print("\n" + "\n".join(lines))


def results(**overrides):
    """Losses of each step and the first step's gradients."""
    run = shared.update_and_grads(**overrides)
    state, losses, first = shared.initial_state(**overrides), [], None
    for step in range(STEPS):
        state, metrics, grads = run(state, shared.batch(step), np.int32(step))
        losses.append(float(metrics[0]))
        first = first or shared.on_host(grads)
    assert int(state.step) == STEPS
    return np.array(losses), first


def worst_leaf(got, expected):
    errors = jax.tree.map(shared.relative, got, expected)
    layers = errors["transformer/layers"]
    if "k_bias" in layers:  # shifts a query's logits all alike: its gradient is zero but for rounding
        everything = np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(expected)))
        k_bias = [tree["transformer/layers"]["k_bias"] for tree in (got, expected)]
        layers["k_bias"] = float(np.linalg.norm(k_bias[0] - k_bias[1]) / everything)
    return max(jax.tree.leaves(errors))


@pytest.mark.parametrize("name", MATRIX)
def test_every_mesh_gives_the_numbers_of_one_device(name):
    overrides = MATRIX[name]
    tolerance = BF16 if overrides.get("dtype") == "bfloat16" else F32
    losses, grads = results(mesh="1x1", **overrides)
    for mesh in shared.MESHES:
        got_losses, got_grads = results(mesh=mesh, **overrides)
        off = np.abs(got_losses / losses - 1)
        measured = {"loss": off[0], "gradient": worst_leaf(got_grads, grads), "after 20 steps": off[-1]}
        TABLE.append((name, mesh, *measured.values()))
        for what, bound in tolerance.items():
            assert measured[what] <= bound, f"{name} on {mesh}: {what} is off by {measured[what]:.2e}, at most {bound}"


@pytest.mark.parametrize("name", [name for name in MATRIX if "dropout" not in MATRIX[name] and "bf" not in name])
def test_one_device_gives_the_numbers_of_the_plain_model(name):
    settings = shared.tiny(mesh="1x1", **MATRIX[name])
    batch = shared.batch(0)
    losses, grads = results(mesh="1x1", **MATRIX[name])
    params = shared.on_host(shared.initial_state(mesh="1x1", **MATRIX[name]).params)
    objective = lambda params: reference.loss(settings, params, batch["tokens"], batch["targets"])[::-1]
    (_, loss), expected = jax.jit(jax.value_and_grad(objective, has_aux=True))(params)
    assert abs(losses[0] / float(loss) - 1) < 1e-6
    assert worst_leaf(grads, shared.on_host(expected)) < 1e-5


def test_dropout_changes_the_loss():
    assert results(mesh="1x1", dropout=0.2)[0][0] != results(mesh="1x1")[0][0]
