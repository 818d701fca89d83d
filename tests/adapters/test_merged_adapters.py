"""Merged matrices are w + alpha / rank * a @ b, and only adapters are trained."""

import jax
import numpy as np
import pytest

from shardformer.adapters import adapter_keys, lora
from shardformer.config.names import LAYERS
from tests import shared


@pytest.mark.parametrize(("rslora", "scales"), [(False, {"q": 3 / 4, "o": 8}), (True, {"q": 3 / 2, "o": 16 / 2**0.5})])
def test_merged_matrix_has_the_scale_of_its_adapter(rslora, scales):
    config = shared.tiny(lora_rank=2, lora_targets="q:4:3,o", rslora=rslora)
    draw = np.random.default_rng(0)
    leaves = {name: draw.normal(size=(2, 6, 6)) for name in ("q", "k", "o")}
    for name, rank in (("q", 4), ("o", 2)):
        leaves[f"{name}_lora_in"] = draw.normal(size=(2, 6, rank))
        leaves[f"{name}_lora_out"] = draw.normal(size=(2, rank, 6))
    merged = lora.merge_adapters(leaves, config)
    assert sorted(merged) == ["k", "o", "q"]
    np.testing.assert_array_equal(merged["k"], leaves["k"])
    for name, scale in scales.items():
        expected = leaves[name] + scale * leaves[f"{name}_lora_in"] @ leaves[f"{name}_lora_out"]
        np.testing.assert_allclose(merged[name], expected, rtol=1e-12)


def test_only_adapters_are_trained():
    params = {LAYERS: {"q": 0, "q_lora_in": 1, "q_lora_out": 2}, "transformer/embed": {"tokens": 3}}
    assert adapter_keys.select_trainable(params, shared.tiny(lora_rank=2)) == {
        LAYERS: {"q_lora_in": 1, "q_lora_out": 2}
    }


def test_new_adapters_leave_the_model_as_it_is():
    params = lora.add_adapters({LAYERS: {"q": np.ones((2, 4, 4)), "v": np.ones((2, 4, 4))}},
                               shared.tiny(lora_rank=2), jax.random.key(0))  # fmt: skip
    assert (params[LAYERS]["q_lora_out"] == 0).all()
    assert (params[LAYERS]["q_lora_in"] != 0).any()
