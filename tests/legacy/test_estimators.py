"""optax's estimators of gradients against those of optax 0.1.5."""

import json
import types
from pathlib import Path

import jax
import numpy as np
import optax
import pytest

from shardformer import legacy
from shardformer.legacy import gradient_estimators

from .record_estimators import Normal, estimates

RECORDED = json.loads((Path(__file__).parent / "goldens" / "estimators.json").read_text())


@pytest.fixture(scope="module")
def found():
    before = jax.config.jax_threefry_partitionable
    names = {**vars(gradient_estimators), "multi_normal": optax.multi_normal}
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            return estimates(types.SimpleNamespace(**names))
    finally:
        jax.config.update("jax_threefry_partitionable", before)


@pytest.mark.parametrize("name", RECORDED)
def test_estimates_equal_optax_0_1_5(found, name):
    assert len(found[name]) == len(RECORDED[name])
    for one, other in zip(found[name], RECORDED[name], strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=1e-5)


def test_the_estimators_differ():
    assert not np.allclose(RECORDED["score_function_jacobians"][0], RECORDED["pathwise_jacobians"][0])
    assert RECORDED["moving_avg_baseline, plain"] != RECORDED["moving_avg_baseline, debiased"]


def test_measure_valued_jacobians_reject_another_distribution():
    with pytest.raises(ValueError, match=r"takes optax\.multi_normal as its dist_builder"):
        gradient_estimators.measure_valued_jacobians(None, (), Normal, None, 1)


def test_install_puts_the_names_back():
    with legacy.installed():
        assert optax.pathwise_jacobians is gradient_estimators.pathwise_jacobians
    assert not hasattr(optax, "pathwise_jacobians")
