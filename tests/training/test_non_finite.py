"""The first layer whose output or gradient is not finite."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer.training import non_finite
from tests import shared

LAYERS = 5


@pytest.fixture(scope="module")
def model():
    return shared.trainer(layers=LAYERS, mesh="2x1").model


@pytest.fixture(scope="module")
def params(model):
    return model.init(0)


def plant(params, module: str, name: str, index, value=jnp.nan) -> dict:
    leaf = params[module][name]
    planted = jax.device_put(np.asarray(leaf.at[index].set(value)), leaf.sharding)
    return params | {module: params[module] | {name: planted}}


def batch(model) -> dict:
    return jax.device_put(shared.batch(), model.sharding(model.row_spec))


def test_sound_outputs_name_nothing(model, params):
    assert non_finite.find_output(model, params, batch(model)) == ""


@pytest.mark.parametrize("layer", range(LAYERS))
def test_first_broken_layer_is_named(model, params, layer):
    broken = plant(params, "transformer/layers", "up", (layer, 0, 0))
    broken = plant(broken, "transformer/layers/norm", "scale", (LAYERS - 1, 0))
    assert f"that of layer {layer} of 0 to 4" in non_finite.find_output(model, broken, batch(model))


def test_broken_embedding_is_named(model, params):
    broken = plant(params, "transformer/embed", "tokens", slice(None))
    assert non_finite.find_output(model, broken, batch(model)).endswith("that of the embedding")


@pytest.mark.slow
def test_first_gradient_of_the_backward_pass_is_named(model, params):
    key = jax.random.key_data(jax.random.key(0))
    assert non_finite.find_gradient(model, params, batch(model), key) == ""
    broken = plant(params, "transformer/layers", "down", (3, 0, 0))
    broken_weights = batch(model) | {"weights": jnp.full((8, 16), jnp.nan)}
    assert "transformer/head" in non_finite.find_gradient(model, params, broken_weights, key)
    assert non_finite.find_gradient(model, broken, batch(model), key)
