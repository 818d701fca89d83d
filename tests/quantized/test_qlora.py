"""Adapters over frozen codes: the gradients are those of the dequantised model, on every mesh."""

import functools

import jax
import numpy as np
import pytest

from shardformer import exact
from shardformer.adapters import adapter_keys
from shardformer.analysis import dense_reference as reference
from shardformer.analysis import traced, verify_exact
from shardformer.config.names import CODES, LAYERS, LORA_OUT
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.objectives.preference_model import PreferenceModel
from shardformer.quantized import code_products, packed_matrix, part_keys
from tests import meshes, shared
from tests.quantized.test_quantized_weights import dequantize

KEYS = {"lora_rank": 2, "lora_targets": "q,o,up,down", "batch": 8, "accum": 1}
EXPERTS = (
    ("experts", 4), ("bias", "none"), ("layers", 1), ("shared_width", 8),
    ("lora_targets", "q,expert_up:3,expert_down:2:4,shared_up"),
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch):
    """Small matrices are multiplied in tiles, and have groups of 8 inputs."""
    monkeypatch.setattr(code_products, "TILE_ROWS", 4)
    monkeypatch.setattr(code_products, "TILE_ELEMENTS", 12 * 16)
    monkeypatch.setattr(code_products, "MOST_ROWS_OF_DIGITS", 0)
    monkeypatch.setattr(part_keys, "GROUP", 8)
    monkeypatch.setattr(packed_matrix, "BLOCK", 6)


@functools.cache
def float_parameters(options=()):
    return verify_exact.draw_parameters(shared.tiny(mesh="1x1", **KEYS | dict(options)))


def make(form, shape="1x1", options=(), **keys):
    """Returns the model on a mesh and its stored parameters; `options` are keys of the architecture."""
    config = shared.tiny(mesh=shape, weights=form, **KEYS | dict(options) | keys)
    model = Model.on(config, mesh.make(config))
    return model, jax.device_put(stored(form, options), model.shardings)


@functools.cache
def stored(form, options=()):
    """Returns the parameters with codes; test_quantized_weights compares those of other meshes."""
    config = shared.tiny(mesh="1x1", weights=form, **KEYS | dict(options))
    model = Model.on(config, mesh.make(config))
    return shared.on_host(jax.jit(model.store)(float_parameters(options)))


def gradients(model, params):
    key = jax.random.key_data(jax.random.key(0))
    return shared.on_host(jax.jit(model.loss_and_grad)(params, shared.batch(), key)[1])


def relative_error(got, expected):
    errors = jax.tree.map(lambda g, e: np.abs(g - e).max() / np.abs(e).max(), got, expected)
    return max(jax.tree.leaves(errors))


@functools.cache
def run_exactly(form, shape, options=(), **keys):
    """Returns the gradients of the adapters in float64."""
    config = shared.tiny(mesh=shape, weights=form, **KEYS | dict(options) | keys)
    return meshes.compute_gradients(config, shared.batch(), float_parameters(options)).gradients


def store_exactly(form, options=()):
    """Returns the codes of the float parameters, with scales in float64, in dicts that a test may change."""
    return jax.tree.map(lambda leaf: leaf, store_once(form, options))


@functools.cache
def store_once(form, options):
    config = shared.tiny(mesh="1x1", weights=form, **KEYS | dict(options))
    return verify_exact.store(traced.make_trainer(config), float_parameters(options))


def compute_densely(params, options=()):
    """Returns the dense gradients of the adapters on dequantised codes, in float64."""
    leaves = jax.tree.leaves(list_arguments(dequantize(params), options))
    closed, tree = trace_densely(options)
    return jax.tree.unflatten(tree, exact.run_jaxpr(closed, leaves).outputs)


@functools.cache
def trace_densely(options):
    """Returns the traced gradient of the dense reference and the structure of its result."""
    config = shared.tiny(mesh="1x1", **KEYS | dict(options))

    def loss(adapters, dense, batch):
        full = adapter_keys.replace_trainable(dense, adapters)
        return reference.loss(config, full, batch["tokens"], batch["targets"])[1]

    arguments = list_arguments(float_parameters(options), options)
    closed, shapes = jax.make_jaxpr(jax.grad(loss), return_shape=True)(*arguments)
    return closed, jax.tree.structure(shapes)


def list_arguments(dense, options) -> tuple:
    """Returns the adapters of dense parameters, the parameters and a batch."""
    config = shared.tiny(mesh="1x1", **KEYS | dict(options))
    return adapter_keys.select_trainable(dense, config), dense, shared.batch()


@pytest.mark.parametrize(
    ("form", "shape", "keys"),
    [
        ("nf4", "1x1", {}),
        ("nf4", "2x4", {"zero": 3, "remat": "full"}),
        ("int4", "1x2x2", {"accum": 4}),
        ("int8", "dp2.cp2.mp2", {"zero": 1, "sequence_parallel": True}),
    ],
)
def test_gradients_equal_dequantised_weights_exactly(form, shape, keys):
    codes = store_exactly(form)
    got = run_exactly(form, shape, **keys)
    assert relative_error(got, compute_densely(codes)) < meshes.EXACT


def test_gradients_of_adapters_of_experts_exactly():
    """The experts are split over dp, where each has the tokens of all shards; codes of another expert are noticed."""
    codes = store_exactly("nf4", EXPERTS)
    got = run_exactly("nf4", "2x2", EXPERTS, expert_axes="dp", zero=3)
    assert relative_error(got, compute_densely(codes, EXPERTS)) < meshes.EXACT
    codes[LAYERS][f"expert_up{CODES}"] = np.roll(codes[LAYERS][f"expert_up{CODES}"], 1, axis=1)
    assert relative_error(got, compute_densely(codes, EXPERTS)) > 1e-2


def test_codes_of_another_layer_are_noticed():
    codes = store_exactly("nf4")
    got = run_exactly("nf4", "1x1")
    codes[LAYERS][f"up{CODES}"] = codes[LAYERS][f"up{CODES}"][::-1]
    assert relative_error(got, compute_densely(codes)) > 1e-2


@pytest.mark.parametrize(
    ("form", "shape", "keys"),
    [
        ("int8", "4x2", {"zero": 3, "loss_chunk": 24}),
        ("nf4", "2x2", {"accum": 2, "sequence_parallel": True}),
        ("int4", "2x1x2", {"accum": 2}),
    ],
)
def test_gradients_of_pairs_equal_dequantised_weights_exactly(form, shape, keys):
    batch = pairs(make_single_trainer().model)
    config = make_single_trainer().config.replace(mesh=shape, weights=form, **keys)
    got = meshes.compute_gradients(config, batch, float_parameters()).gradients
    assert relative_error(got, compute_gradients_of_pairs(form)) < meshes.EXACT
    assert relative_error(got, compute_gradients_of_pairs("nf4" if form == "int8" else "int8")) > 1e-3


@functools.cache
def compute_gradients_of_pairs(form):
    """Returns the gradients of one device on dequantised codes."""
    trainer, params = make_single_trainer(), dequantize(store_exactly(form))
    return meshes.compute_gradients(trainer.config, pairs(trainer.model), params, trainer).gradients


@functools.cache
def make_single_trainer():
    """Returns a trainer of pairs without codes, on one device; it traces its gradients once."""
    return verify_exact.make_trainer(shared.tiny(mesh="1x1", objective="dpo", **KEYS))


# Compiled: a CPU multiplies tiles of the codes, which the exact interpreter does not.


@pytest.mark.slow
@pytest.mark.parametrize(
    ("form", "shape", "keys"), [("nf4", "2x4", {"zero": 3, "remat": "full"}), ("int4", "1x2x2", {"accum": 4})]
)
def test_gradients_equal_dequantised_weights(form, shape, keys):
    assert relative_error(gradients(*make(form, shape, **keys)), compute_densely(stored(form))) < 1e-5


@pytest.mark.nightly
def test_gradients_of_adapters_of_experts():
    model, params = make("nf4", "2x2", EXPERTS, expert_axes="dp", zero=3)
    compute = jax.jit(lambda params: model.loss_and_grad(params, shared.batch(), np.zeros(2, np.uint32))[1])
    expected = compute_densely(stored("nf4", EXPERTS), EXPERTS)
    assert relative_error(shared.on_host(compute(params)), expected) < 1e-5


def pairs(model, seed=0) -> dict:
    """Returns a batch of random pairs with random references."""
    draw = np.random.RandomState(seed)

    def fill(leaf):
        whole = leaf.dtype == np.int32
        return draw.randint(0, shared.VOCAB, leaf.shape).astype(np.int32) if whole else draw.rand(*leaf.shape)

    batch = {name: np.asarray(fill(leaf), leaf.dtype) for name, leaf in model.batch_shapes().items()}
    return batch | {"scored": np.round(batch["scored"]), "pairs": np.ones_like(batch["pairs"])}


def make_pairs(form, **keys):
    """Returns a model of pairs on one device."""
    config = shared.tiny(mesh="1x1", weights=form, objective="dpo", **KEYS | keys)
    return PreferenceModel.on(config, mesh.make(config))


def run_one_device_exactly(model, params, batch):
    shapes = model.abstract, verify_exact.describe(batch)
    return exact.run(model.log_probabilities, params, batch, shapes=shapes).outputs


def run_compiled(model, params, batch):
    return jax.jit(model.log_probabilities)(params, batch)


@pytest.mark.parametrize("run", [run_one_device_exactly, pytest.param(run_compiled, marks=pytest.mark.slow)])
def test_reference_is_the_model_without_adapters(run):
    """Adapters start at zero: the precomputed references are bitwise those of adapters that are switched off."""
    model, frozen = make_pairs("nf4"), make_pairs("nf4", lora_rank=0)
    params, batch = store_exactly("nf4"), pairs(model)
    if run is run_compiled:
        params = jax.tree.map(lambda leaf, like: leaf.astype(like.dtype), params, model.abstract)
    names = [name for name in params[LAYERS] if name.endswith(LORA_OUT)]
    assert len(names) == 4
    trained = run(model, params, batch)
    params[LAYERS] |= {name: np.zeros_like(params[LAYERS][name]) for name in names}
    expected = run(frozen, adapter_keys.remove_adapters(params), batch)
    np.testing.assert_array_equal(run(model, params, batch), expected)
    assert np.abs(trained - expected).max() > 1e-3
