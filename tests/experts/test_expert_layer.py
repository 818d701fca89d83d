"""The balance loss of experts, whose gradient must not be rounding of a constant, and the arrays of a CPU's program."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import exact
from shardformer.config.names import MP
from shardformer.experts import grouped_product
from shardformer.experts.expert_layer import Routes, RoutesOfLayers
from shardformer.layout import resolve
from tests import asserts, sharded, shared

LAYERS, ROWS, EXPERTS = 2, 3, 3
CONFIG = shared.tiny(mesh="1x1", bias="none", experts=EXPERTS, experts_per_token=1, balance_loss=0.5)
LOGITS = sharded.normal(0, LAYERS, ROWS, CONFIG.model.seq, EXPERTS)


def slope_of_logits(count_LE) -> np.ndarray:
    """Returns the gradient of the objective in the routers' logits, for these counts of the global batch."""

    def objective(logits_LBTE, _, count_LE):
        score_BLE = jax.nn.softmax(logits_LBTE).sum(2).swapaxes(0, 1)
        zeros_BL = jnp.zeros((ROWS, LAYERS))
        routes = Routes(jnp.zeros_like(score_BLE), score_BLE, zeros_BL, zeros_BL)
        return RoutesOfLayers(resolve(CONFIG)).complete(jnp.zeros(()), routes, count_LE)

    def run(logits_LBTE, mp, count_LE):
        return jax.grad(objective)(logits_LBTE, mp, count_LE)

    slope = jax.vmap(run, axis_name=MP, in_axes=(None, 0, None))
    return exact.run(slope, LOGITS, np.zeros(1, np.float32), np.float32(count_LE)).outputs[0]


def test_equal_load_has_no_gradient():
    count = ROWS * CONFIG.model.seq // EXPERTS
    assert not slope_of_logits([[count] * EXPERTS] * LAYERS).any()


def test_gradient_of_the_balance_loss_is_its_closed_form():
    count_LE, scores = np.array([[1, 2, 9], [5, 3, 4]]), np.exp(np.float64(LOGITS))
    scores /= scores.sum(-1, keepdims=True)
    factor = 0.5 * EXPERTS * count_LE[:, None, None] / 12 / (ROWS * CONFIG.model.seq)
    want = scores * (factor - (scores * factor).sum(-1, keepdims=True))
    assert asserts.relative(slope_of_logits(count_LE), want) < 1e-14
    assert asserts.relative(slope_of_logits(count_LE[::-1]), want) > 0.1


MANY = {
    "experts": 16, "expert_width": 32, "d_model": 64, "heads": 4, "seq": 32, "batch": 64, "layers": 1, "vocab": 64,
    "bias": "none",
}  # fmt: skip
PAIRS = 2 * 32 * 64  # of a token and an expert


def measure_arrays() -> tuple[int, float, int]:
    """Returns the numbers in the largest array of a compiled step, its temporaries in arrays of all rows, and the rows.

    An array of all rows has a row of d_model numbers for each pair, and one more block for each expert.
    """
    model, key = shared.trainer(mesh="1x1", **MANY).model, np.zeros(2, np.uint32)
    tokens = jax.ShapeDtypeStruct((64, 32), np.int32)
    batch = {"tokens": tokens, "targets": tokens}
    step = jax.jit(lambda *args: model.loss_and_grad(*args)).lower(model.abstract, batch, key).compile()
    shapes = re.findall(r"\w\d+\[([\d,]+)\]", step.as_text())
    rows = PAIRS + 16 * model.layout.experts.block
    temporaries = step.memory_analysis().temp_size_in_bytes / (4 * rows * 64)
    return max(math.prod(map(int, shape.split(","))) for shape in shapes), temporaries, rows


@pytest.mark.slow
def test_step_has_no_array_of_all_experts_and_tokens():
    largest, temporaries, rows = measure_arrays()
    assert largest == rows * 64
    assert temporaries < 16


@pytest.mark.slow
def test_dense_product_of_all_experts_is_noticed(broken):
    shared.trainer(mesh="1x1", **MANY)  # its shapes are traced under vmap, which JAX's dense product lacks
    broken(grouped_product, "multiply_blocks", lambda x, w, sizes, _: jax.lax.ragged_dot(x, w, sizes))
    largest, temporaries, rows = measure_arrays()
    assert largest == 16 * rows * 64
    assert temporaries > 64
