"""A model with quantised weights is the model of its dequantised weights, on every mesh and with ZeRO."""

import functools
import math

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.analysis import traced, verify_exact
from shardformer.config.names import BLOCKS, CODES, LAYERS, SCALES
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.quantized import code_products, packed_matrix, part_keys
from tests import meshes, shared

MODELS = {
    "parallel": {},
    "tied, previous tokens": {"tied": True, "previous_tokens": 2},
    "tied, sequential, shared heads": {"tied": True, "block": "sequential", "kv_heads": 2, "positions": "learned"},
    "adapters, gated": {"activation": "swiglu", "lora_rank": 2, "lora_targets": "q,down"},
    "experts": {"experts": 4, "bias": "none", "activation": "swiglu", "shared_width": 8, "shared_gate": True},
    "experts over dp": {"experts": 4, "bias": "none", "activation": "swiglu", "expert_axes": "dp"},
    "parts of groups": {"d_model": 24, "head_dim": 6, "d_ff": 56},  # 8 inputs share a scale, and mp=4 splits them
    "experts, widths split": {"experts": 6, "expert_width": 8, "bias": "none"},  # mp=4 does not divide the experts
}
CASES = (
    ("parallel", "1x4", 0, "int8"),
    ("parallel", "2x2", 3, "int4"),
    ("experts over dp", "2x2", 3, "int8"),
    ("experts", "2x2", 3, "nf4"),
    ("tied, sequential, shared heads", "1x4", 0, "int8"),
    ("experts, widths split", "1x4", 0, "int8"),
    ("tied, sequential, shared heads", "1x4", 0, "nf4"),
    ("adapters, gated", "4x2", 3, "nf4"),
    ("parts of groups", "1x4", 0, "nf4"),
)
MESHES = (("2x4", 0), ("4x2", 3))
FORMS = ("int8", "nf4")


@pytest.fixture(autouse=True)
def multiply_in_tiles(monkeypatch):
    """Small matrices are multiplied in tiles too, with a last one that is shorter."""
    monkeypatch.setattr(code_products, "TILE_ROWS", 4)
    monkeypatch.setattr(code_products, "TILE_ELEMENTS", 12 * 16)


@pytest.fixture(autouse=True)
def share_scales(monkeypatch):
    """Matrices have groups of 8 inputs: those of mp=4 are full, unless heads have other sizes."""
    monkeypatch.setattr(part_keys, "GROUP", 8)
    monkeypatch.setattr(packed_matrix, "BLOCK", 6)


def settings(name, shape="1x1", zero=0, form="int8"):
    return shared.tiny(mesh=shape, zero=zero, batch=8, accum=1, weights=form, **{"heads": 4} | MODELS[name])


@functools.cache
def float_parameters(name):
    """Returns random parameters, with matrices that make all logits differ."""
    return verify_exact.draw_parameters(settings(name).replace(weights="float"))


@functools.cache
def tokens():
    return np.random.RandomState(0).randint(0, shared.VOCAB, (8, 16)).astype(np.int32)


def stored(name, shape="1x1", zero=0, form="int8"):
    """Returns the model on a mesh and its stored parameters, in dicts that a test may change."""
    model, params = stored_once(name, shape, zero, form)
    return model, jax.tree.map(lambda leaf: leaf, params)


@functools.cache
def stored_once(name, shape, zero, form):
    config = settings(name, shape, zero, form)
    model = Model.on(config, mesh.make(config))
    like = model.read_abstract
    return model, model.store(jax.tree.map(lambda p, s: jax.device_put(p, s.sharding), float_parameters(name), like))


def store_exactly(name, shape, zero, form):
    """Returns the model on a mesh without devices, and its parameters stored in float64."""
    trainer = traced.make_trainer(settings(name, shape, zero, form))
    return trainer.model, verify_exact.store(trainer, float_parameters(name))


def dequantize(params):
    """Returns the float matrices of stored parameters, by NumPy."""
    params = shared.on_host(params)

    def matrix(leaves, name):
        base = name.removesuffix(CODES)
        codes, scales = leaves[name], leaves[base + SCALES]
        if codes.dtype == np.int8:
            return codes * scales.astype(np.float64)
        if base + BLOCKS in leaves:
            return dequantize_nf4(codes, scales, leaves[base + BLOCKS])
        return spread(scales, codes) * (unpack(codes).astype(np.float64) - 8)

    return {
        module: {
            name.removesuffix(CODES): matrix(leaves, name) if name.endswith(CODES) else leaf
            for name, leaf in leaves.items()
            if not name.endswith((SCALES, BLOCKS))
        }
        for module, leaves in params.items()
    }


def unpack(codes):
    result = np.empty((*codes.shape[:-2], 2 * codes.shape[-2], codes.shape[-1]), np.uint8)
    result[..., ::2, :], result[..., 1::2, :] = codes // 16, codes % 16
    return result


def spread(scales, codes):
    """Returns the scale of each value."""
    return np.repeat(scales.astype(np.float64), 2 * codes.shape[-2] // scales.shape[-2], axis=-2)


def dequantize_nf4(codes, scales, blocks):
    by_output = np.swapaxes(packed_matrix.dynamic_levels()[scales], -1, -2)
    flat = by_output.reshape(*by_output.shape[:-2], -1)
    flat = flat * np.repeat(blocks[..., :-1], 6, axis=-1)[..., : flat.shape[-1]] + blocks[..., -1:]
    exact = np.swapaxes(flat.reshape(by_output.shape), -1, -2)
    return spread(exact, codes) * np.array(packed_matrix.NF4_LEVELS, np.float32)[unpack(codes)]


def expect_logits(name, params):
    """Returns the dense reference's logits with the values that stored parameters stand for."""
    return meshes.compute_logits(settings(name), dequantize(params), tokens())


def compute_logits(model, params):
    return exact.run(Decoder(model).logits, params, tokens(), shapes=(model.abstract, verify_exact.describe(tokens())))


def measure(got, expected) -> float:
    """Returns the largest difference, relative to the largest logit."""
    return np.abs(np.asarray(got)[..., : shared.VOCAB] - expected).max() / np.abs(expected).max()


@pytest.mark.parametrize(("name", "shape", "zero", "form"), CASES)
def test_logits_equal_dequantised_weights(name, shape, zero, form):
    model, params = store_exactly(name, shape, zero, form)
    _, of_one_device = store_exactly(name, "1x1", 0, form)
    assert measure(compute_logits(model, params).outputs, expect_logits(name, of_one_device)) < meshes.EXACT


@pytest.mark.parametrize(("name", "matrix", "axis"), [("parallel", "up", -1), ("experts", "expert_up", 1)])
def test_scales_of_another_shard_or_expert_are_noticed(name, matrix, axis):
    model, params = store_exactly(name, "4x2", 0, "int8")
    expected = expect_logits(name, params)
    scales = params[LAYERS][f"{matrix}{SCALES}"]
    by = scales.shape[axis] // 2  # each shard of mp=2 has the scales of the other
    params[LAYERS] |= {f"{matrix}{SCALES}": np.roll(scales, by, axis)}
    assert measure(compute_logits(model, params).outputs, expected) > 1e-3


# A CPU multiplies tiles of the codes, which the exact interpreter does not.
@pytest.mark.parametrize(
    ("name", "form"), [("parallel", "int8"), pytest.param("parts of groups", "nf4", marks=pytest.mark.slow)]
)
def test_compiled_logits_equal_dequantised_weights(name, form):
    model, params = stored(name, "2x4", form=form)
    got = jax.jit(Decoder(model).logits)(params, tokens())
    assert measure(got, expect_logits(name, params)) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_codes_are_bitwise_the_same_on_every_mesh(form):
    expected = shared.on_host(stored("parallel", form=form)[1])
    for shape, zero in MESHES:
        model, params = stored("parallel", shape, zero, form)
        assert jax.tree.all(jax.tree.map(np.array_equal, shared.on_host(params), expected))
        assert jax.tree.all(jax.tree.map(lambda leaf, like: leaf.sharding == like.sharding, params, model.abstract))


@pytest.mark.parametrize("form", FORMS)
def test_no_device_stores_more_than_its_part(form):
    """Codes and scales of a matrix are split over mp as the matrix is, and over dp with ZeRO.

    The test above compares what devices store with these shardings, on two of the meshes.
    """
    for shape, zero, parts in (("4x2", 0, 2), ("2x4", 0, 4), ("4x2", 3, 8)):
        leaves = traced.make_trainer(settings("parallel", shape, zero, form)).model.abstract[LAYERS]
        for leaf in (leaves[f"up{CODES}"], leaves[f"up{SCALES}"], leaves[f"down{CODES}"]):
            assert math.prod(leaf.sharding.shard_shape(leaf.shape)) * parts == leaf.size
        assert leaves[f"up{CODES}"].dtype == (np.int8 if form == "int8" else np.uint8)


@pytest.mark.parametrize("form", FORMS)
def test_tables_of_previous_tokens_are_int8(form):
    leaves = traced.make_trainer(settings("tied, previous tokens", "2x4", 0, form)).model.abstract["transformer/embed"]
    codes, scales = leaves[f"previous{CODES}"], leaves[f"previous{SCALES}"]
    assert (codes.dtype, scales.shape) == (np.int8, (*codes.shape[:2], 1))
    assert [leaf.sharding.shard_shape(leaf.shape)[1] * 4 for leaf in (codes, scales)] == [codes.shape[1]] * 2
