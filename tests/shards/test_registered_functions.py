"""A new activation, norm or position encoding is one function: it trains on every mesh with nothing else changed."""

import jax.numpy as jnp
import pytest
from jax import lax

from shardformer import collectives
from shardformer.analysis import verify, verify_exact
from shardformer.config import registries
from shardformer.errors import UsageError
from shardformer.kernels.activations import ACTIVATIONS
from shardformer.shards.norm import NORMS
from shardformer.shards.parameters import weight, zeros
from shardformer.shards.positions import POSITIONS
from tests import meshes, shared


def squared_relu(x):
    return jnp.square(jnp.maximum(x, 0))


def reglu(x, gate):
    return jnp.maximum(gate, 0) * x


def tanh_norm(x_BTD, eps):
    """DyT, with a parameter of another name than a norm's scale."""
    return jnp.tanh(x_BTD * (1 + zeros("slope", 1).reshape(1, 1, 1)))


def kerple(config, distance_TS):
    h = collectives.local(config.model.heads)
    slope_h = weight("slope", [1, h], 0.02)[0]
    return -slope_h.reshape(1, h, 1, 1) * jnp.log1p(distance_TS.astype(jnp.float32))[None, None]


def sinusoidal(config, position_BT):
    d = collectives.local(config.model.d_model)
    column_d = (collectives.offset(d) + lax.iota(jnp.int32, d)).reshape(1, 1, d)
    return jnp.sin(position_BT[..., None].astype(jnp.float32) / (1 + column_d.astype(jnp.float32)))


CASES = {
    "activation": (ACTIVATIONS, (squared_relu, reglu)),
    "norm": (NORMS, (tanh_norm,)),
    "positions": (POSITIONS, (kerple, sinusoidal)),
}


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    monkeypatch.setattr(registries, "ADDED", {})
    for registry, functions in CASES.values():
        for function in functions:
            monkeypatch.setitem(registry, function.__name__, function)  # removes it after the test
            registry.register(function)


@pytest.mark.parametrize(
    "keys",
    [
        {"activation": "squared_relu"},
        {"activation": "reglu"},
        {"norm": "tanh_norm"},
        {"positions": "kerple", "mesh": "dp2.cp2.mp2"},
        {"positions": "sinusoidal"},
    ],
)
def test_new_function_equals_one_device(keys):
    config = shared.tiny(**{"mesh": "2x2", "zero": 3, "layers": 1} | keys)
    meshes.assert_exact(meshes.find_differences(config, with_steps=False))


def test_function_that_forgets_its_shard_is_noticed(monkeypatch):
    """The negative twin: each shard takes the first columns."""
    monkeypatch.setitem(
        POSITIONS,
        "sinusoidal",
        lambda config, position_BT: jnp.sin(
            position_BT[..., None].astype(jnp.float32)
            / (1 + lax.iota(jnp.float32, collectives.local(config.model.d_model))).reshape(1, 1, -1)
        ),
    )
    rows = meshes.find_differences(shared.tiny(positions="sinusoidal", mesh="1x2"), with_steps=False)
    assert max(row.relative for row in rows) > 1e-3


def test_positions_without_a_known_parameter_are_rejected(monkeypatch):
    def misspelt(config, distances_TS): ...

    monkeypatch.setitem(POSITIONS, "misspelt", misspelt)
    POSITIONS.register(misspelt)
    with pytest.raises(UsageError, match="positions=misspelt has no parameter of position_BT, distance_TS, long_rows"):
        shared.tiny(positions="misspelt")
    assert shared.tiny(positions="none").model.positions == "none"


def test_dense_reference_names_what_it_lacks():
    config = shared.tiny(mesh="1x1", positions="kerple")
    assert not verify_exact.has_dense_reference(config)
    with pytest.raises(UsageError, match="the dense reference has no positions=kerple: write it in"):
        verify.reference_loss_and_gradients(config, {}, {})
