"""`verify` passes experts, and sees the NaN of one without tokens.

tests/integration/test_experts.py has the other mistakes that mixtures of experts of others have made, exactly.
"""

import numpy as np
import pytest

from shardformer.analysis import verify
from shardformer.config.names import LAYERS
from shardformer.experts.grouped_product import Blocks
from shardformer.layout import mesh
from shardformer.model import Model
from tests import shared

CONFIG = shared.tiny(
    mesh="2x2", layers=1, experts=4, bias="none", activation="swiglu", d_ff=16, accum=2, balance_loss=0.1,
    balance_rate=0.01, router_z_loss=0.01,
)  # fmt: skip


@pytest.fixture(scope="module")
def expected():
    parameters, batch = verify.draw_parameters(verify.make_dense_trainer(CONFIG)), verify.weighted_batch(CONFIG)
    return parameters, batch, verify.reference_loss_and_gradients(CONFIG, parameters, batch)


def find_failed(expected) -> list[str]:
    """Returns the names of the differences that do not pass."""
    parameters, batch, dense = expected
    got = verify.loss_and_gradients(Model.on(CONFIG, mesh.make(CONFIG)), parameters, batch)[:2]
    return [row.name for row in verify.compare_loss_and_gradients(dense, got) if not row.passes]


@pytest.mark.slow
def test_verify_passes_experts(expected):
    assert find_failed(expected) == []
    gradients = expected[2][1][LAYERS]
    assert (gradients["expert_up"][0, 0] == 0).all()  # the expert without tokens
    assert (np.abs(gradients["expert_up"][0, 1:]).max((1, 2)) > 0).all()


@pytest.mark.slow
def test_verify_sees_nan_of_an_expert_without_tokens(expected, broken):
    multiply = Blocks.multiply

    def divide_by_tokens(self, x_MI, w_EIO, size_E):
        share_E = (size_E / size_E).astype(w_EIO.dtype)
        return multiply(self, x_MI, w_EIO * share_E[:, None, None], size_E)

    broken(Blocks, "multiply", divide_by_tokens)
    assert find_failed(expected)[0].startswith("transformer/layers/expert_")
