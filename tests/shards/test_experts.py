"""The balance loss of experts, whose gradient must not be rounding of a constant."""

import jax
import jax.numpy as jnp
import numpy as np

from shardformer.config.names import MP
from shardformer.layout import resolve
from shardformer.shards.experts import Routes, RoutesOfLayers
from tests import asserts, sharded, shared

LAYERS, ROWS, EXPERTS = 2, 3, 3
CONFIG = shared.tiny(mesh="1x1", bias="none", experts=EXPERTS, experts_per_token=1, balance_loss=0.5)
LOGITS = sharded.normal(0, LAYERS, ROWS, CONFIG.model.seq, EXPERTS)


def slope_of_logits(count_LE) -> np.ndarray:
    """Returns the gradient of the objective in the routers' logits, for these counts of the global batch."""

    def objective(logits_LBTE, _):
        score_BLE = jax.nn.softmax(logits_LBTE).sum(2).swapaxes(0, 1)
        zeros_BL = jnp.zeros((ROWS, LAYERS))
        routes = Routes(jnp.zeros_like(score_BLE), score_BLE, zeros_BL, zeros_BL)
        return RoutesOfLayers(resolve(CONFIG)).complete(jnp.zeros(()), routes, jnp.asarray(count_LE, jnp.float32))

    def run(mp):
        return jax.grad(objective)(LOGITS, mp)

    return np.asarray(jax.jit(jax.vmap(run, axis_name=MP))(jnp.zeros(1))[0])


def test_equal_load_has_no_gradient():
    count = ROWS * CONFIG.model.seq // EXPERTS
    assert not slope_of_logits([[count] * EXPERTS] * LAYERS).any()


def test_gradient_of_the_balance_loss_is_its_closed_form():
    count_LE, scores = np.array([[1, 2, 9], [5, 3, 4]]), np.exp(np.float64(LOGITS))
    scores /= scores.sum(-1, keepdims=True)
    factor = 0.5 * EXPERTS * count_LE[:, None, None] / 12 / (ROWS * CONFIG.model.seq)
    want = scores * (factor - (scores * factor).sum(-1, keepdims=True))
    assert asserts.relative(slope_of_logits(count_LE), want) < 2e-7
    assert asserts.relative(slope_of_logits(count_LE[::-1]), want) > 0.1
