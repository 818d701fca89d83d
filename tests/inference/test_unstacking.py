"""The arrays of each layer for decoding: equal to the stacked ones, and none in memory twice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.config.names import is_stacked
from shardformer.inference.unstacking import Unstacking
from shardformer.layout import mesh
from shardformer.model import Model
from tests import shared


@pytest.fixture(scope="module")
def model():
    config = shared.tiny(mesh="1x2", weights="int8")
    return Model.on(config, mesh.make(config))


@pytest.fixture(scope="module")
def params(model):
    """Different values in each layer."""

    def make(like):
        values = np.arange(like.size).reshape(like.shape).astype(like.dtype)
        return jax.device_put(values, like.sharding)

    return jax.tree.map(make, model.abstract)


def list_stacked(params) -> dict:
    return {
        (module, name): leaf for module, leaves in params.items() for name, leaf in leaves.items() if is_stacked(module)
    }


def live_bytes() -> int:
    return sum(leaf.nbytes for leaf in jax.live_arrays())


def test_layers_are_slices_and_other_arrays_are_shared(model, params):
    unstacked = Unstacking(model)(params)
    for (module, name), leaf in list_stacked(params).items():
        layers = unstacked[module][name]
        np.testing.assert_array_equal(np.stack(layers), leaf)
        assert all(layer.sharding.spec == jax.P(*model.specs[module][name][1:]) for layer in layers)
    others = [module for module in params if not is_stacked(module)]
    assert others
    assert all(unstacked[module][name] is leaf for module in others for name, leaf in params[module].items())


def test_donated_stacks_are_freed(model, params):
    copies = jax.tree.map(jnp.copy, params)
    before = live_bytes()
    donated = Unstacking(model)(copies, donate=True)
    assert live_bytes() == before
    assert all(leaf.is_deleted() for leaf in list_stacked(copies).values())
    kept = Unstacking(model)(params)
    assert live_bytes() == before + sum(leaf.nbytes for leaf in list_stacked(params).values())
    assert donated.keys() == kept.keys()
