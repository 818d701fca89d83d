"""The update of the routers' biases: by the sign of each expert's excess of tokens, down to a single one."""

import jax.numpy as jnp
import pytest

from shardformer.config.names import LAYERS, ROUTER_BIAS
from shardformer.optim import chain
from tests import shared

BATCH, RATE = 4, 0.1


@pytest.mark.parametrize("objective", ["lm", "dpo"])
def test_excess_of_one_token_moves_the_bias(objective):
    config = shared.tiny(objective=objective, experts=3, bias="none", balance_rate=RATE, batch=BATCH, mesh="1x1")
    rows = BATCH if objective == "lm" else 2 * BATCH  # pairs have two sides
    optimizer = chain.make_optimizer(config)
    params = {LAYERS: {ROUTER_BIAS: jnp.zeros((1, 3))}}
    gradient = {LAYERS: {ROUTER_BIAS: jnp.array([[1.0, 0.0, -1.0]]) / rows}}
    updates, _ = optimizer.update(gradient, optimizer.init(params), params, step=0, norm=jnp.float32(0))
    assert updates[LAYERS][ROUTER_BIAS].tolist() == [[-jnp.float32(RATE), 0, jnp.float32(RATE)]]


def test_optimizer_of_adapters_has_no_biases():
    """The biases of a base are frozen, as all of its parameters."""
    config = shared.tiny(experts=3, bias="none", balance_rate=RATE, lora_rank=2, mesh="1x1")
    assert not config.mixture.moves_router_bias
    assert config.replace(lora_rank=0).mixture.moves_router_bias
