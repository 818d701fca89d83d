"""The hardware's kernels: Pallas' in interpret mode against plain attention; both lowered for absent devices."""

import importlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu import splash_attention
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.analysis import temporaries
from shardformer.devices.chips import Hardware
from shardformer.errors import UsageError
from shardformer.kernels.attention import ATTENDED
from shardformer.kernels.fused_attention import EVERYTHING, Range, attend_by_kernel
from shardformer.layout import mesh, resolve
from shardformer.model import Model
from tests import asserts, sharded, shared

T, K = 128, 16  # the least that the TPU's kernel takes
Q, KEYS, VALUES, FACTOR = (sharded.normal(seed, 2, T, 4, K) for seed in range(4))
DOCUMENTS = np.tile(np.arange(T, dtype=np.int32) // 50, (2, 1))
SPLIT = P("dp", None, "mp")


DISTANCE = np.arange(T)[:, None] - np.arange(T)


def plain(q, k, v, documents, bounds=EVERYTHING):
    k, v = (jnp.repeat(x, q.shape[2] // x.shape[2], axis=2) for x in (k, v))
    logits = jnp.einsum("bthk,bshk->bhts", q, k) / np.float32(np.sqrt(K))
    logits = jnp.tanh(logits / bounds.cap) * bounds.cap if bounds.cap else logits
    reached = (DISTANCE >= 0) & ((bounds.window or T) > DISTANCE)
    seen = reached[None, None] & (documents[:, :, None] == documents[:, None, :])[:, None]
    return jnp.einsum("bhts,bshk->bthk", jax.nn.softmax(jnp.where(seen, logits, -1e30)), v)


def value_and_grads(documents, g=4, bounds=EVERYTHING):
    def total(q, k, v):
        return (plain(q, k, v, documents, bounds) * FACTOR).sum()

    return exact.run(jax.value_and_grad(total, argnums=(0, 1, 2)), Q, KEYS[:, :, :g], VALUES[:, :, :g]).outputs


@pytest.mark.parametrize(
    ("g", "bounds"),
    [(4, EVERYTHING), pytest.param(2, Range(window=40, cap=0.7), marks=pytest.mark.slow)],
    ids=["causal", "windows"],
)
def test_pallas_equals_plain_attention(g, bounds):
    def body(q, k, v, documents, factor):
        def total(q, k, v):
            return (attend_by_kernel("tpu", q, k, v, documents, bounds) * factor).sum()

        value, grads = jax.value_and_grad(total, argnums=(0, 1, 2))(q, k, v)
        return lax.psum(value, ("dp", "mp")), grads

    step = sharded.compile_on_mesh(body, (2, 2), (SPLIT, SPLIT, SPLIT, P("dp"), SPLIT), (P(), (SPLIT,) * 3))
    with pltpu.force_tpu_interpret_mode():
        value, grads = shared.on_host(step(Q, KEYS[:, :, :g], VALUES[:, :, :g], DOCUMENTS, FACTOR))
    expected_value, expected = value_and_grads(DOCUMENTS, g, bounds)
    assert abs(value / expected_value - 1) < 2e-6
    assert max(map(asserts.relative, grads, expected)) < 1e-6
    others = [value_and_grads(0 * DOCUMENTS, g, bounds)[1]]  # that it stops where a document does is seen
    if bounds.window:
        others += [value_and_grads(DOCUMENTS, g, Range(*other))[1] for other in ((39, 0.7), (40, None))]
    assert min(asserts.relative(*pair) for other in others for pair in zip(grads, other, strict=True)) > 1e-3


def bare_splash(q):
    mask = splash_attention.MultiHeadMask([splash_attention.CausalMask((T, T))])
    return jax.vmap(splash_attention.make_splash_mha_single_device(mask))(q, q, q)


def test_pallas_rejects_untyped_outputs():
    step = sharded.compile_on_mesh(bare_splash, (2, 2), (P("dp", "mp"),), P("dp", "mp"))
    with pytest.raises(ValueError, match="manual_axis_type"):
        step.trace(jax.ShapeDtypeStruct((2, 2, T, K), jnp.float32))


TPU, AMPERE, HOPPER = Hardware("tpu"), Hardware("gpu", 8.0), Hardware("gpu", 9.0)


def lowered_for(hardware, **overrides):
    """The text of a loss and its gradient; the mesh is of CPU devices."""
    config = shared.tiny(**{"mesh": "2x4", "seq": T, "layers": 1, "dtype": "bfloat16"} | overrides)
    model = Model(resolve(config, hardware), mesh.make(config))
    batch = {name: jax.ShapeDtypeStruct((8, T), jnp.int32) for name in ("tokens", "targets")}
    key = jax.ShapeDtypeStruct((2,), jnp.uint32)
    traced = jax.jit(lambda *args: model.loss_and_grad(*args)).trace(model.abstract, batch, key)
    return traced.lower(lowering_platforms=({"gpu": "cuda"}.get(hardware.platform, hardware.platform),)).as_text()


@pytest.fixture
def cudnn_is_there(monkeypatch):
    cudnn = importlib.import_module("jax._src.cudnn.fused_attention_stablehlo")  # which asks for libraries of CUDA
    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91000)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    monkeypatch.setattr(cudnn, "is_cuda_compute_capability_equal", lambda capability: False)


RECOMPUTING = [
    pytest.param({}, id="none"),
    pytest.param({"remat": "dots"}, id="dots", marks=pytest.mark.slow),
    pytest.param({"zero": 3}, id="zero", marks=pytest.mark.slow),
    pytest.param({"remat": "attention"}, id="attention", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("overrides", RECOMPUTING)
def test_step_is_lowered_for_a_tpu(overrides):
    text = lowered_for(TPU, attention="fused", **overrides)
    assert text.count("tpu_custom_call") == 3  # forward once, and two backward


@pytest.mark.parametrize(("platform", "named"), [("tpu", 2), ("gpu", 3)])
def test_kernel_keeps_each_result_once(platform, named, cudnn_is_there):
    """The values, and one number of each row; of cuDNN an empty array too."""
    q = jax.ShapeDtypeStruct((1, T, 1, K), jnp.bfloat16)

    def attend(q, k, v):
        return attend_by_kernel(platform, q, k, v).astype(jnp.float32).sum()

    text = str(jax.make_jaxpr(jax.grad(attend, argnums=(0, 1, 2)))(q, q, q))
    assert len(re.findall(rf"(?i:name)\[name={ATTENDED}\]", text)) == named


@pytest.mark.parametrize(("platform", "named"), [("tpu", 2), ("gpu", 3)])
def test_kernel_keeps_grouped_heads_once(platform, named, cudnn_is_there):
    """Splash attention keeps one number of each row beside the values; keys and values are never repeated."""
    q, k = (jax.ShapeDtypeStruct((1, T, heads, 64), jnp.bfloat16) for heads in (8, 2))

    def attend(q, k, v):
        return attend_by_kernel(platform, q, k, v, None, Range(window=40))

    text = str(jax.make_jaxpr(lambda *qkv: jax.vjp(attend, *qkv)[0])(q, k, k))
    assert len(re.findall(rf"(?i:name)\[name={ATTENDED}\]", text)) == named
    kept = jax.tree.leaves(jax.eval_shape(lambda *qkv: jax.vjp(attend, *qkv)[1], q, k, k))
    sizes = sorted(leaf.size for leaf in kept if leaf.size >= T * 64)
    assert sizes == [2 * T * 64] * 2 + [8 * T * 64] * 2  # keys and values; queries and results


def test_auto_lowers_the_kernel_and_full_runs_it_again():
    assert lowered_for(TPU, remat="full").count("tpu_custom_call") == 4
    assert "tpu_custom_call" not in lowered_for(TPU, attention="plain")


@pytest.mark.parametrize("overrides", RECOMPUTING)
def test_step_is_lowered_for_a_gpu(overrides, cudnn_is_there):
    text = lowered_for(AMPERE, attention="fused", heads=4, **overrides)
    assert text.count("__cudnn$fmhaSoftmax(") == 1
    assert text.count("__cudnn$fmhaSoftmaxBackward(") == 1


GROUPED = {"kv_heads": 4, "window": 40, "attention_cap": 2.0}


@pytest.mark.parametrize("overrides", RECOMPUTING)
def test_grouped_windows_are_lowered_for_a_tpu(overrides):
    text = lowered_for(TPU, attention="fused", **GROUPED | overrides)
    assert text.count("tpu_custom_call") == 3
    assert text.count("splash_mha_fwd") > 0


MIXED = {"kv_heads": 4, "window": 40, "window_pattern": "wf"}


@pytest.mark.parametrize(
    ("overrides", "calls"),
    [({}, 2 * 3), pytest.param({"scan": False, "remat": "dots"}, 2 * 3, marks=pytest.mark.slow)],
    ids=["groups", "unrolled"],
)
def test_pattern_of_windows_is_lowered_for_a_tpu(overrides, calls):
    """Each place of the pattern has its own kernels, and remat does not hide the windows from them."""
    text = lowered_for(TPU, attention="fused", **MIXED | {"layers": 4} | overrides)
    assert text.count("tpu_custom_call") == calls


def test_cudnn_gets_the_window_and_grouped_heads(cudnn_is_there):
    text = lowered_for(AMPERE, attention="fused", heads=4, kv_heads=4, d_model=64, window=40)
    assert re.findall(r"sliding_window_length\W+(\d+)", text.replace("\\22", "'")) == ["40", "40"]


def test_cudnn_gets_a_causal_mask_each_way(cudnn_is_there):
    text = lowered_for(AMPERE, attention="fused", heads=4)
    assert re.findall(r"mask_type\W+(\w+)", text.replace("\\22", "'")) == ["CAUSAL", "CAUSAL"]


@pytest.mark.parametrize(("capability", "found"), [("8.0", 8.0), ("10.3", 10.3), ("gfx90a", 0.0), (None, 0.0)], ids=str)
def test_hardware_describes_a_device(capability, found):
    known = {} if capability is None else {"compute_capability": capability}
    device = types.SimpleNamespace(platform="gpu", **known)
    assert Hardware.of_device(device) == Hardware("gpu", found)


def test_fused_is_rejected_on_a_cpu_and_can_be_planned():
    with pytest.raises(UsageError, match="attention=fused: cpu devices have no kernel; give attention=auto"):
        shared.trainer(mesh="1x1", attention="fused")
    assert temporaries.estimate_temporaries(resolve(shared.tiny(mesh="1x1", attention="fused")))
