"""Adapters of experts: every mesh gives the losses and gradients of a dense reference, in float64."""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.adapters import adapter_keys, lora
from shardformer.analysis import verify_exact
from shardformer.config.names import LAYERS
from shardformer.experts import expert_layer
from tests import asserts, shared

KEYS = {
    "experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 32, "layers": 1, "balance_loss": 0.1,
    "shared_width": 8, "lora_rank": 2,
    "lora_targets": "q,expert_up,expert_gate:3,expert_down:2:4,shared_up,shared_down",
}  # fmt: skip
MESHES = (
    ("1x1", {}),
    ("2x2", {"expert_axes": "dp", "zero": 3, "sequence_parallel": True}),
    ("1x8", {}),  # mp does not divide the experts: their widths are split
)
MIXED = {
    "experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 24, "expert_width": 16, "layers": 2,
    "expert_pattern": "de", "lora_rank": 2, "lora_targets": "up,gate:3,down:2:4,expert_up,expert_down",
}  # fmt: skip
DROPOUT_KEY = np.zeros(2, np.uint32)


def draw_parameters(**keys):
    """Returns parameters of which none is zero, adapters included."""
    return verify_exact.draw_parameters(shared.tiny(mesh="1x1", **keys))


@functools.cache
def expected(**keys):
    config = shared.tiny(mesh="1x1", **keys)
    return verify_exact.compute_dense(config, draw_parameters(**keys), shared.batch(), DROPOUT_KEY)


def compute(trainer, **keys):
    return verify_exact.compute_gradients(trainer, draw_parameters(**keys), shared.batch(), DROPOUT_KEY)


@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_adapters_of_experts_equal_the_dense_model(mesh, options):
    got = compute(shared.trainer(mesh=mesh, **KEYS, **options), **KEYS)
    asserts.assert_gradients_equal(got, expected(**KEYS))


def test_adapters_of_dense_layers_equal_the_dense_model():
    """Each layer has the adapters of its own feed-forward."""
    asserts.assert_gradients_equal(
        compute(shared.trainer(mesh="4x2", zero=1, accum=2, **MIXED), **MIXED), expected(**MIXED)
    )


@pytest.mark.slow
def test_compiled_adapters_of_experts_equal_the_dense_model():
    mesh, options = MESHES[1]
    arguments = draw_parameters(**KEYS), shared.batch(), DROPOUT_KEY
    trainer = shared.trainer(mesh=mesh, **KEYS, **options)
    asserts.assert_compiled_gradients_equal(trainer, *arguments, expected(**KEYS))


def test_adapters_of_dense_and_expert_layers_are_stacked_apart():
    layers = draw_parameters(**MIXED)[LAYERS]
    assert layers["gate_lora_in"].shape == (1, 32, 3)
    assert layers["expert_up_lora_in"].shape == (1, 4, 32, 2)


def test_adapter_of_another_expert_is_noticed(broken):
    weight = expert_layer.weight
    broken(expert_layer, "weight", lambda *args, **keys: jax.numpy.roll(weight(*args, **keys), 1, axis=0))
    got, want = compute(shared.trainer(mesh="1x1", **KEYS), **KEYS), expected(**KEYS)
    assert abs(got.loss / want.loss - 1) > 1e-4
    assert asserts.worst_relative(got.gradients, want.gradients) > 0.1


def test_merged_adapters_give_the_same_loss():
    adapted, config = draw_parameters(**KEYS), shared.tiny(mesh="1x1", **KEYS)
    model = shared.trainer(mesh="1x1", **KEYS | {"lora_rank": 0, "lora_targets": "q,v"}).model

    def evaluate_merged(params, batch):
        layers = lora.merge_adapters(params[LAYERS], config)
        assert not any(map(adapter_keys.is_adapter, layers))
        return model.evaluate(params | {LAYERS: layers}, batch)

    loss, _ = exact.run(evaluate_merged, adapted, shared.batch()).outputs
    with_adapters, _ = exact.run(shared.trainer(mesh="1x1", **KEYS).model.evaluate, adapted, shared.batch()).outputs
    assert abs(loss / with_adapters - 1) < 1e-13


def test_new_adapters_leave_the_model_unchanged():
    layers = exact.run(shared.trainer(mesh="1x1", **KEYS).model._init, np.int32(0)).outputs[LAYERS]
    assert layers["expert_gate_lora_in"].shape == (1, 4, 32, 3)
    assert np.std(layers["expert_down_lora_in"]) == pytest.approx(32**-0.5, rel=0.15)
    assert not layers["expert_up_lora_out"].any()
