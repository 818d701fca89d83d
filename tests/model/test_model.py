"""The functions of a Model on whole arrays, beyond the losses and gradients that test_parity compares."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from shardformer import exact
from shardformer.adapters import lora
from shardformer.analysis import verify_exact
from shardformer.kernels.linear import linear
from shardformer.kernels.remat import Remat
from shardformer.layout import mesh
from shardformer.model import Decoder, Model
from shardformer.model.model import average_tokens
from shardformer.shards.layer import TransformerLayerShard
from shardformer.shards.parameters import weight
from tests import asserts, meshes, sharded, shared

OPTIONS = {
    "tiny": {},
    "rotary on a part of each head": {"rotary_dims": 2, "heads": 4},
    "a feed-forward width": {"d_ff": 48},
    "every bias": {"bias": "all", "block": "sequential", "positions": "none"},
    "no bias, tied": {"bias": "none", "tied": True, "scan": False},
    "T5": {"positions": "t5", "norm": "rmsnorm"},
    "learned": {"positions": "learned"},
}


@functools.cache
def model(name="2x4", **overrides):
    config = shared.tiny(mesh=name, **overrides)
    return Model.on(config, mesh.make(config))


@functools.cache
def parameters(name="2x4", **overrides):
    """No bias is zero and no gain is one, as they are after a while."""
    m = model(name, **overrides)
    values = [0.3 * sharded.normal(i, *leaf.shape) for i, leaf in enumerate(jax.tree.leaves(m.shapes))]
    return jax.device_put(jax.tree.unflatten(jax.tree.structure(m.shapes), values), m.shardings)


@functools.cache
def logits():
    return jax.jit(Decoder(model()).logits)


@pytest.mark.parametrize("name", OPTIONS)
def test_logits_are_those_of_the_plain_model(name):
    overrides = OPTIONS[name]
    tokens, params = shared.batch()["tokens"], verify_exact.draw_parameters(model(**overrides).config)
    got = exact.run(Decoder(model(**overrides)).logits, params, tokens).outputs
    assert got.shape == (8, 16, 64)
    expected = meshes.compute_logits(model(**overrides).config, params, tokens)
    assert asserts.relative(got[..., : shared.VOCAB], expected) < meshes.EXACT
    assert (got[..., shared.VOCAB :] == -np.inf).all()


def test_compiled_logits_are_those_of_the_plain_model():
    tokens = shared.batch()["tokens"]
    got = logits()(parameters(), tokens)
    assert got.shape == (8, 16, 64)
    assert got.dtype == jnp.float32
    assert got.sharding.spec == P("dp", None, "mp")
    expected = meshes.compute_logits(model().config, parameters(), tokens)
    assert asserts.relative(got[..., : shared.VOCAB], expected) < 1e-5
    assert (np.asarray(got[..., shared.VOCAB :]) == -np.inf).all()


def test_no_token_sees_what_follows_it():
    tokens = shared.batch()["tokens"]
    changed = tokens.copy()
    changed[:, 9] = (changed[:, 9] + 1) % shared.VOCAB
    before, after = (np.asarray(logits()(parameters(), ids)) for ids in (tokens, changed))
    np.testing.assert_array_equal(before[:, :9], after[:, :9])
    assert (before[:, 9:, : shared.VOCAB] != after[:, 9:, : shared.VOCAB]).any(-1).all()


def test_a_prompts_padding_does_not_matter():
    tokens = shared.batch()["tokens"]
    prefill = jax.jit(
        lambda params, tokens: Decoder(model()).prefill(params, tokens, np.full(len(tokens), 5, np.int32), 5, 16)[0]
    )
    padded = np.where(np.arange(16) < 5, tokens, 0).astype(np.int32)
    whole = np.asarray(logits()(parameters(), tokens))[:, 4]
    np.testing.assert_array_equal(prefill(parameters(), tokens), prefill(parameters(), padded))
    real = slice(shared.VOCAB)
    assert asserts.relative(prefill(parameters(), tokens)[:, real], whole[:, real]) < 1e-5


@pytest.mark.slow
def test_sums_are_weighted():
    batch, m = shared.batch(), model()
    weights = np.where(np.arange(16)[None] < np.arange(1, 9)[:, None], 1, 0).astype(np.float32)  # 36 of 128 targets
    sums = jax.jit(m.sums)
    got = sums(parameters(), batch | {"weights": weights})
    out = meshes.compute_logits(m.config, parameters(), batch["tokens"])
    nats = -np.take_along_axis(jax.nn.log_softmax(out), batch["targets"][..., None], -1)[..., 0]
    assert float(got.tokens) == 36
    np.testing.assert_allclose(got.nats, (weights * nats).sum(), rtol=1e-5)
    np.testing.assert_array_equal(got.correct, weights[np.asarray(out.argmax(-1)) == batch["targets"]].sum())

    every = sums(parameters(), batch | {"weights": np.ones_like(weights)})
    np.testing.assert_allclose(every.nats / every.tokens, nats.mean(), rtol=1e-5)
    assert abs(float(every.nats / every.tokens) / float(got.nats / got.tokens) - 1) > 1e-3


def test_sums_are_those_of_the_microbatches():
    batch = shared.batch() | {"weights": np.where(np.arange(16)[None] < np.arange(8)[:, None], 1, 0).astype(np.float32)}
    whole, cut = (exact.run(model(accum=accum).sums, parameters(), batch).outputs for accum in (1, 4))
    assert float(whole.tokens) == float(cut.tokens) == 28
    assert float(whole.correct) == float(cut.correct)
    np.testing.assert_allclose(cut.nats, whole.nats, rtol=1e-12)


def temporary_bytes(jitted, *args):
    return jitted.lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.slow
def test_an_evaluation_takes_the_memory_of_a_microbatch():
    shape = (32, 16)
    batch = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("tokens", "targets")}
    batch["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    models = (model("1x1", batch=32, accum=accum, vocab=2000) for accum in (1, 16))
    whole, cut = (temporary_bytes(jax.jit(m.sums), m.abstract, batch) for m in models)
    assert cut < whole / 4


SPLIT = {"mesh": "8x1", "zero": 3, "layers": 6, "d_model": 128, "seq": 4}


def step_bytes(**overrides):
    config = shared.tiny(**SPLIT | overrides)
    m = Model.on(config, mesh.make(config))
    batch = {name: jax.ShapeDtypeStruct((8, 4), np.int32) for name in ("tokens", "targets")}
    return temporary_bytes(jax.jit(m.loss_and_grad), m.abstract, batch, jax.ShapeDtypeStruct((2,), np.uint32))


known_step_bytes = functools.cache(step_bytes)  # of the product as it is


def gathered_bytes(**overrides):
    """Returns the bytes of all layers' parameters, as a backward pass would have them that keeps them."""
    config = shared.tiny(**SPLIT | overrides)
    layers = Model.abstract_parameters(config)["transformer/layers"]
    return np.dtype(config.parallel.dtype).itemsize * sum(leaf.size for leaf in layers.values())


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [{}, {"lora_rank": 2, "lora_targets": "q,k,v,o,up,down"}],
)
def test_zero_3_never_holds_the_whole_model(overrides):
    """Nor for the backward pass: with activations kept it takes little more than what recomputing all takes."""
    everything = step_bytes(**overrides | {"remat": "full"})
    assert known_step_bytes(**overrides) < everything + gathered_bytes(**overrides) / 4


@pytest.mark.slow
def test_layers_kept_for_the_backward_pass_are_noticed(broken):
    right = known_step_bytes()
    broken(Remat, "recompute_layer", lambda self, layer, in_loop: layer)
    assert step_bytes() > right + 0.9 * gathered_bytes()


def step_costs(**overrides):
    """FLOPs and bytes of a loss and its gradient; few tokens, so that matrices are what counts."""
    config = shared.tiny(mesh="1x1", layers=2, d_model=256, batch=2, **overrides)
    m = Model.on(config, mesh.make(config))
    batch = {name: jax.ShapeDtypeStruct((2, 16), np.int32) for name in ("tokens", "targets")}
    compiled = jax.jit(m.loss_and_grad).lower(m.abstract, batch, jax.ShapeDtypeStruct((2,), np.uint32)).compile()
    memory = compiled.memory_analysis()
    return compiled.cost_analysis()["flops"], memory.temp_size_in_bytes + memory.output_size_in_bytes


@pytest.mark.slow
def test_adapters_cost_no_gradient_of_whole_matrices(broken):
    adapters = {"lora_rank": 2, "lora_targets": "q,k,v,o,up,down"}
    full, ours = step_costs(), step_costs(**adapters)
    assert ours[0] < 0.75 * full[0]
    assert ours[1] < 0.5 * full[1]

    def added_up(self, name, x, stddev=None, out=None):
        """The twin: w + a @ b, whose gradient is that of the whole matrix."""
        w, a, b = (weight(f"{name}{part}", shape, 1.0) for part, shape in (
            ("", [x.shape[-1], out or self.config.model.d_model]), (lora.IN, [x.shape[-1], 2]),
            (lora.OUT, [2, out or self.config.model.d_model])))  # fmt: skip
        return linear(x, w + 8 * (a @ b))

    broken(TransformerLayerShard, "linear", added_up)
    wrong = step_costs(**adapters)
    assert wrong[0] > 1.25 * ours[0]
    assert wrong[1] > 1.25 * ours[1]


@pytest.mark.slow
def test_an_evaluation_has_no_dropout():
    with_dropout, without = model(dropout=0.5), model()
    params, batch = parameters(), shared.batch()
    key = np.array([0, 0], np.uint32)

    def loss(m, *key):
        return float(exact.run(m.evaluate, params, batch, *key).outputs[1].loss)

    assert loss(with_dropout) == loss(without)
    assert loss(with_dropout, key) != loss(without)


def test_abstract_parameters_are_what_init_makes():
    m = model(positions="learned")
    same = jax.tree.map(lambda p, a: (p.shape, p.dtype, p.sharding) == (a.shape, a.dtype, a.sharding),
                        m.init(0), m.abstract)  # fmt: skip
    assert all(jax.tree.leaves(same))


def test_bias_none_leaves_no_bias_nor_offset():
    def biases(**overrides):
        shapes = Model.abstract_parameters(shared.tiny(positions="learned", **overrides))
        return {name for leaves in shapes.values() for name in leaves if "bias" in name or name == "offset"}

    assert biases(bias="none") == set()
    assert biases(bias="ff") == {"bias", "offset", "up_bias", "down_bias"}
    assert biases(bias="ff", head_bias=False) == {"offset", "up_bias", "down_bias"}
    assert biases(bias="all", tied=True) == {"offset", *(f"{name}_bias" for name in ("q", "k", "v", "o", "up", "down"))}


@pytest.mark.parametrize("init_std", [0.02, None])
def test_initial_sizes_come_from_global_shapes(init_std):
    """They are the same on every mesh: see test_initialisation.py."""
    drawing = model("1x1", layers=8, init_std=init_std, positions="learned")._init
    params = exact.run(drawing, np.int32(0)).outputs
    layers, D, F = params["transformer/layers"], 32, 128
    expected = {"q": D, "k": D, "v": D, "up": D, "o": D, "down": F}
    for leaf, fan_in in expected.items():
        depth = np.sqrt(2 * 8) if leaf in ("o", "down") else 1  # residual branches add up
        assert abs(float(layers[leaf].std()) * depth / (init_std or fan_in**-0.5) - 1) < 0.05, leaf
        assert len({float(each.std()) for each in layers[leaf]}) == 8  # every layer its own numbers
    embed, head = params["transformer/embed"], params["transformer/head"]
    for leaf, tolerance in ((embed["tokens"], 0.05), (embed["positions"], 0.15), (head["w"], 0.1)):
        assert abs(float(leaf.std()) / (init_std or D**-0.5) - 1) < tolerance
    assert not np.asarray(layers["down_bias"]).any()
    assert (np.asarray(params["transformer/layers/norm"]["scale"]) == 1).all()


def test_tables_narrower_than_the_layers_have_their_own_fan_in():
    drawing = model("1x1", init_std=None, positions="learned", embed_dim=8)._init
    params = exact.run(drawing, np.int32(0)).outputs
    tables = params["transformer/embed"] | params["transformer/head"]
    for leaf, fan_in in {"tokens": 8, "w": 8, "positions": 32}.items():
        assert abs(float(tables[leaf].std()) * fan_in**0.5 - 1) < 0.15, leaf


def test_mean_of_tokens_is_exact_to_float32():
    draws = [np.random.default_rng(seed).gamma(4, 1, (32, 64)).astype(np.float32) for seed in range(8)]

    def worst(mean):
        return max(abs(float(mean(x)) / x.mean(dtype=np.float64) - 1) for x in draws)

    assert worst(jax.jit(average_tokens)) < 2e-7
    assert worst(lambda x: np.cumsum(x, dtype=np.float32)[-1] / np.float32(x.size)) > 3e-7  # one token after the other
