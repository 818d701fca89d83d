"""A model with weights=int8 is the model of its dequantised weights, on every mesh and with ZeRO."""

import functools

import jax
import numpy as np
import pytest

from shardformer.analysis import dense_reference as reference
from shardformer.config.names import CODES, LAYERS, SCALES
from shardformer.kernels import quantized
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from tests import shared

MODELS = {
    "parallel": {},
    "tied, sequential, shared heads": {"tied": True, "block": "sequential", "kv_heads": 2, "positions": "learned"},
    "adapters, gated": {"activation": "swiglu", "lora_rank": 2, "lora_targets": "q,down"},
    "experts": {"experts": 4, "bias": "none", "activation": "swiglu", "shared_width": 8, "shared_gate": True},
    "experts, widths split": {"experts": 6, "expert_width": 8, "bias": "none"},  # mp=4 does not divide the experts
}
MESHES = (("2x4", 0), ("1x1", 0), ("4x2", 0), ("4x2", 3))


@pytest.fixture(autouse=True)
def multiply_in_tiles(monkeypatch):
    """Small matrices are multiplied in tiles too, with a last one that is shorter."""
    monkeypatch.setattr(quantized, "ROWS", 4)
    monkeypatch.setattr(quantized, "TILE_ELEMENTS", 12 * 16)


def settings(name, shape="1x1", zero=0):
    return shared.tiny(mesh=shape, zero=zero, heads=4, batch=8, accum=1, weights="int8", **MODELS[name])


@functools.cache
def float_parameters(name):
    """Returns a drawn model's parameters, with matrices that make all logits differ."""
    params = shared.drawn(settings(name).replace(weights="float"), 3)
    return jax.tree.map(lambda p: p + np.random.RandomState(p.size).normal(0, 0.2, p.shape).astype(p.dtype), params)


@functools.cache
def tokens():
    return np.random.RandomState(0).randint(0, shared.VOCAB, (8, 16)).astype(np.int32)


def stored(name, shape="1x1", zero=0):
    """Returns the model on a mesh and its stored parameters."""
    config = settings(name, shape, zero)
    model = Model.on(config, mesh.make(config))
    like = model.read_abstract
    return model, model.store(jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), float_parameters(name), like))


def dequantize(params):
    """Returns the float matrices of stored parameters, by NumPy."""
    params = shared.on_host(params)

    def matrix(leaves, name):
        return leaves[name].astype(np.float32) * leaves[name.removesuffix(CODES) + SCALES]

    return {
        module: {
            name.removesuffix(CODES): matrix(leaves, name) if name.endswith(CODES) else leaf
            for name, leaf in leaves.items()
            if not name.endswith(SCALES)
        }
        for module, leaves in params.items()
    }


@functools.cache
def expected_logits(name):
    return np.asarray(reference.logits(settings(name), dequantize(stored(name)[1]), tokens()))[..., : shared.VOCAB]


def logits(model, params):
    return np.asarray(jax.jit(Decoder(model).logits)(params, tokens()))[..., : shared.VOCAB]


@pytest.mark.parametrize(
    ("name", "shape", "zero"),
    [
        ("parallel", "2x4", 0),
        ("parallel", "4x2", 3),
        ("tied, sequential, shared heads", "1x1", 0),
        ("tied, sequential, shared heads", "2x4", 0),
        ("adapters, gated", "4x2", 0),
        ("adapters, gated", "4x2", 3),
        ("experts", "2x4", 0),
        ("experts", "4x2", 3),
        ("experts, widths split", "2x4", 0),
    ],
)
def test_logits_equal_dequantised_weights(name, shape, zero):
    expected, got = expected_logits(name), logits(*stored(name, shape, zero))
    assert np.abs(got - expected).max() < 1e-5 * np.abs(expected).max()


def test_scales_of_another_shard_are_noticed():
    model, params = stored("parallel", "4x2")
    scales = params[LAYERS][f"up{SCALES}"]
    half = scales.shape[-1] // 2
    swapped = np.roll(np.asarray(scales), half, axis=-1)  # each shard of mp=2 has the scales of the other
    params[LAYERS][f"up{SCALES}"] = jax.device_put(swapped, scales.sharding)
    expected = expected_logits("parallel")
    assert np.abs(logits(model, params) - expected).max() > 1e-3 * np.abs(expected).max()


def test_scales_of_another_expert_are_noticed():
    model, params = stored("experts", "2x4")
    scales = params[LAYERS][f"expert_up{SCALES}"]
    params[LAYERS][f"expert_up{SCALES}"] = jax.device_put(np.roll(np.asarray(scales), 1, axis=1), scales.sharding)
    expected = expected_logits("experts")
    assert np.abs(logits(model, params) - expected).max() > 1e-3 * np.abs(expected).max()


def test_codes_are_bitwise_the_same_on_every_mesh():
    expected = shared.on_host(stored("parallel")[1])
    for shape, zero in MESHES:
        got = shared.on_host(stored("parallel", shape, zero)[1])
        assert jax.tree.all(jax.tree.map(np.array_equal, got, expected))


def test_no_device_stores_more_than_its_part():
    """Codes of a matrix are split over mp as the matrix is, and over dp with ZeRO."""
    for shape, zero, parts in (("4x2", 0, 2), ("2x4", 0, 4), ("4x2", 3, 8)):
        codes = stored("parallel", shape, zero)[1][LAYERS][f"up{CODES}"]
        assert codes.dtype == np.int8
        assert codes.addressable_shards[0].data.size * parts == codes.size
