"""Adapters of experts: every mesh gives the losses and gradients of a dense reference."""

import functools

import jax
import numpy as np
import pytest

from shardformer.analysis import dense_reference
from shardformer.config.names import LAYERS
from shardformer.model import lora
from shardformer.shards import expert_adapters
from tests import asserts, shared

KEYS = {
    "experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 32, "layers": 1, "balance_loss": 0.1,
    "shared_width": 8, "lora_rank": 2,
    "lora_targets": "q,expert_up,expert_gate:3,expert_down:2:4,shared_up,shared_down",
}  # fmt: skip
MESHES = (
    ("1x1", {}),
    ("4x2", {"zero": 1, "accum": 2}),
    ("2x2", {"expert_axes": "dp", "zero": 3, "sequence_parallel": True}),
    ("1x8", {}),  # mp does not divide the experts: their widths are split
)
CLOSE = 2e-6
MIXED = {
    "experts": 4, "bias": "none", "activation": "swiglu", "d_ff": 24, "expert_width": 16, "layers": 2,
    "expert_pattern": "de", "lora_rank": 2, "lora_targets": "up,gate:3,down:2:4,expert_up,expert_down",
}  # fmt: skip


def parameters():
    """Returns parameters with adapters that are not zero."""
    return draw_adapters(**KEYS)


@functools.cache
def draw_adapters(**keys):
    params = shared.drawn(shared.tiny(mesh="1x1", **keys), 0)
    draw = np.random.default_rng(0)
    adapted = {name: 0.3 * draw.normal(size=leaf.shape).astype(np.float32) for name, leaf in params[LAYERS].items()
               if lora.is_adapter(name)}  # fmt: skip
    return params | {LAYERS: params[LAYERS] | adapted}


@functools.cache
def expected(**keys):
    config = shared.tiny(mesh="1x1", **keys)
    compute = jax.jit(functools.partial(dense_reference.losses_and_gradients, config))
    (nats, _), gradients = compute(draw_adapters(**keys), shared.batch())
    return float(nats), lora.select_trainable(shared.on_host(gradients), config)


def measure(model, **keys):
    """Returns the relative error of the loss, and of the worst gradient."""
    keys = keys or KEYS
    params = jax.device_put(draw_adapters(**keys), model.shardings)
    losses, gradients = jax.jit(lambda *args: model.loss_and_grad(*args))(
        params, shared.batch(), np.zeros(2, np.uint32)
    )
    nats, want = expected(**keys)
    return abs(float(losses.loss) / nats - 1), asserts.worst_relative(shared.on_host(gradients), want)


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "options"), MESHES, ids=str)
def test_adapters_of_experts_equal_the_dense_model(mesh, options):
    loss, gradient = measure(shared.trainer(mesh=mesh, **KEYS, **options).model)
    assert loss < CLOSE
    assert gradient < CLOSE


@pytest.mark.slow
def test_adapters_of_dense_layers_equal_the_dense_model():
    """Each layer has the adapters of its own feed-forward; the reference is in float32 too, and less exact."""
    loss, gradient = measure(shared.trainer(mesh="4x2", zero=1, **MIXED).model, **MIXED)
    assert loss < CLOSE
    assert gradient < 1e-5


@pytest.mark.slow
def test_adapters_of_dense_and_expert_layers_are_stacked_apart():
    layers = draw_adapters(**MIXED)[LAYERS]
    assert layers["gate_lora_in"].shape == (1, 32, 3)
    assert layers["expert_up_lora_in"].shape == (1, 4, 32, 2)


@pytest.mark.slow
def test_adapter_of_another_expert_is_noticed(broken):
    weight = expert_adapters.weight
    broken(expert_adapters, "weight", lambda *args, **keys: jax.numpy.roll(weight(*args, **keys), 1, axis=0))
    model = shared.trainer(mesh="1x1", **KEYS).model
    loss, gradient = measure(type(model)(model.layout, model.mesh))
    assert loss > 100 * CLOSE
    assert gradient > 0.1


@pytest.mark.slow
def test_merged_adapters_give_the_same_loss():
    adapted, config = parameters(), shared.tiny(mesh="1x1", **KEYS)
    merged = adapted | {LAYERS: lora.merge_adapters(adapted[LAYERS], config)}
    assert not any(map(lora.is_adapter, merged[LAYERS]))
    model = shared.trainer(mesh="1x1", **KEYS | {"lora_rank": 0, "lora_targets": "q,v"}).model
    loss, _ = jax.jit(model.evaluate)(merged, shared.batch())
    with_adapters, _ = jax.jit(shared.trainer(mesh="1x1", **KEYS).model.evaluate)(adapted, shared.batch())
    assert abs(float(loss) / float(with_adapters) - 1) < CLOSE


def test_new_adapters_leave_the_model_unchanged():
    layers = shared.drawn(shared.tiny(mesh="1x1", **KEYS), 0)[LAYERS]
    assert layers["expert_gate_lora_in"].shape == (1, 4, 32, 3)
    assert np.std(layers["expert_down_lora_in"]) == pytest.approx(32**-0.5, rel=0.15)
    assert not layers["expert_up_lora_out"].any()
