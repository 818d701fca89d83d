"""Pipeline stages in a whole run: the numbers of one device, one model on every mesh, and what they cost."""

import functools

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.analysis import memory, program_collectives, traced, verify_exact
from shardformer.errors import UsageError
from shardformer.inference.generator import Generator
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.parallel.replicas import Replicated
from tests import asserts, meshes, runs, shared
from tests.integration import test_parity

GPT = "learned no-bias sequential rmsnorm"
T5 = "t5 tied biases parallel dropout remat"
ROWS = (  # the dropout masks of the first depend on the number of each layer
    ("1x1x4", "learned no-bias sequential rmsnorm dropout", {"layers": 8, "accum": 4, "pipeline_rounds": 2}),
    ("4x1x2", GPT, {"layers": 8, "accum": 2, "pipeline_rounds": 4, "zero": 3}),
    ("2x2x2", T5, {"layers": 4, "accum": 4, "pipeline_rounds": 2, "zero": 1}),
    ("1x1x8", GPT, {"layers": 8, "accum": 8, "attention": "blocks"}),
)


@pytest.mark.parametrize(("shape", "words", "options"), ROWS)
def test_stages_equal_one_device(shape, words, options):
    keys = test_parity.overrides_of(words) | options
    meshes.assert_equals_one_device(with_steps=options.get("zero") == 3, mesh=shape, **keys)


@pytest.mark.slow
def test_compiled_stages_give_the_gradients_of_the_exact_device():
    shape, words, options = ROWS[0]
    config = shared.tiny(mesh=shape, **test_parity.overrides_of(words) | options)
    params, key = shared.drawn(config, 0), np.array([3, 4], np.uint32)
    model = Model.on(config, mesh.make(config))
    losses, gradients = jax.jit(model.loss_and_grad)(jax.device_put(params, model.shardings), shared.batch(), key)
    expected = verify_exact.compute_gradients(
        traced.make_trainer(verify_exact.on_one_device(config)), params, shared.batch(), key
    )
    assert abs(losses.loss / expected.loss - 1) <= test_parity.F32["loss"]
    assert test_parity.worst_leaf(shared.on_host(gradients), expected.gradients) <= test_parity.F32["gradient"]


def test_an_evaluation_gives_the_sums_of_one_device():
    config = shared.tiny(mesh="2x1x4", layers=4, accum=4, positions="learned", documents="masked")
    meshes.assert_equal_sums(config)
    assert meshes.measure_sums(config)[0].tokens < 8 * 16


def test_gradients_that_the_stages_do_not_share_are_refused(broken):
    """The types of shard_map see that those of the head, say, are not the same on every stage."""
    t = shared.trainer(mesh="1x1x2", accum=2)

    def gradient():
        return lambda params: t.model.loss_and_grad(params, shared.batch(), t.dropout_key(0))

    jax.eval_shape(gradient(), t.model.abstract)
    broken(Replicated, "mean", lambda self, grads: grads)
    with pytest.raises(ValueError, match="out_specs"):
        jax.eval_shape(gradient(), t.model.abstract)


def test_a_sum_over_the_stages_in_the_mean_s_place_is_seen(broken):
    mean = Replicated.mean

    def add_in_layers(self, grads):
        return {m: g if "layers" in m else mean(self, {m: g})[m] for m, g in grads.items()}

    config = shared.tiny(mesh="1x1x2", layers=8, accum=4, **test_parity.overrides_of(GPT))
    expected = meshes.compute_on_one_device(verify_exact.on_one_device(config))
    broken(Replicated, "mean", add_in_layers)
    rows = verify_exact.compare(meshes.compute_gradients(config), expected, "one device")
    wrong = {row.name: row.relative for row in rows if not row.passes}
    assert wrong["gradient of transformer/layers/q"] == pytest.approx(1)  # twice
    assert "gradient of transformer/head/w" not in wrong


# What it costs.


@functools.cache
def compiled(accum, **overrides):
    """The gradient's program, with microbatches of two rows."""
    config = shared.tiny(mesh="1x1x4", layers=8, seq=32, accum=accum, batch=2 * accum, **overrides)
    model = Model.on(config, mesh.make(config))
    batch = {
        name: jax.ShapeDtypeStruct((config.training.batch, config.model.seq), np.int32)
        for name in ("tokens", "targets")
    }
    key = jax.ShapeDtypeStruct((2,), np.uint32)
    return jax.jit(model.loss_and_grad).lower(model.abstract, batch, key).compile()


ACTIVATION = 4 * 2 * 32 * 32  # bytes of a microbatch between two stages


def growth(**overrides):
    """Temporary bytes of one more microbatch, in what a stage sends on."""
    temporary = [compiled(accum, **overrides).memory_analysis().temp_size_in_bytes for accum in (8, 16)]
    return (temporary[1] - temporary[0]) / 8 / ACTIVATION


@pytest.mark.slow
def test_stage_keeps_its_inputs_and_its_share_of_embeddings():
    assert growth(remat="full") == pytest.approx(1 + 1 / 4, rel=0.05)
    kept = compiled(8, remat="none").memory_analysis().temp_size_in_bytes
    assert kept > 8 * 10 * 2 * ACTIVATION  # all products of two layers


@pytest.mark.slow
def test_the_compiled_program_has_the_formula_s_ticks():
    """Two rings each way at every tick, and the last microbatch once more on its way home."""
    found = program_collectives.parse_collectives(compiled(8, remat="full").as_text())
    sent = program_collectives.total_by_kind(found, (1, 1, 4))
    ticks = 8 + 4 - 1
    tensors = 2 * (2 * ticks + 1)
    assert sent["collective-permute", "pp"] == (tensors, tensors * ACTIVATION)


# One model, one file.


PIPED = {"mesh": "2x2x2", "layers": 8, "accum": 2, "batch": 8, "zero": 1, "ema": 0.9, "pipeline_rounds": 2}


@pytest.mark.slow
def test_seed_is_one_model_and_a_stage_holds_only_its_layers():
    t = shared.trainer(**PIPED)
    params = t.model.init(7)
    assert asserts.is_bitwise_equal(
        shared.on_host(params), shared.on_host(shared.trainer(mesh="1x1", layers=8).model.init(7))
    )
    for leaf in jax.tree.leaves(params["transformer/layers"]):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {4}
    predicted = memory.predict_bytes(t.config)
    state = t.init()
    for device in jax.devices():
        shards = [s for leaf in jax.tree.leaves(state.params) for s in leaf.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) == predicted.parameters


@pytest.mark.slow
def test_a_checkpoint_does_not_know_its_stages(tmp_path):
    """From stages to none and back, bitwise."""
    t = shared.trainer(**PIPED)
    state, _ = t.step(t.init(), shared.batch(), 0)
    expected = shared.on_host(state)
    plain = shared.trainer(mesh="1x2", layers=8, ema=0.9)
    restored = checkpoint.restore(checkpoint.save(tmp_path / "piped", 1, state, {}), plain.abstract)
    assert asserts.is_bitwise_equal(shared.on_host(restored), expected)
    again = checkpoint.restore(checkpoint.save(tmp_path / "plain", 1, restored, {}), t.abstract)
    assert asserts.is_bitwise_equal(shared.on_host(again), expected)
    assert again.params["transformer/layers"]["q"].sharding == t.shardings.params["transformer/layers"]["q"]


@pytest.mark.nightly
def test_a_run_is_sampled_and_evaluated_on_other_meshes(tmp_path, text, capsys):
    out = tmp_path / "run"
    words = ("tiny", "steps=2", "eval_every=2", "save_every=2", "mesh=2x1x2", "accum=2", f"data={text}", f"out={out}")
    assert runs.train(*words, sample=True) == 0
    said = capsys.readouterr().out
    assert "mesh 2x1x2 (dp x mp x pp) of cpu devices" in said
    assert "it writes:" in said
    assert main(["eval", str(out), "mesh=1x1x2", "split=test"]) == 0
    piped = capsys.readouterr().out
    assert main(["eval", str(out), "mesh=1x1", "split=test"]) == 0
    assert capsys.readouterr().out == piped


def test_sampling_takes_a_mesh_without_stages():
    piped = shared.tiny(**PIPED)
    folded = piped.without_stages()
    assert (folded.parallel.mesh, folded.parallel.zero, folded.parallel.devices) == ("4x2", 3, 8)
    with pytest.raises(UsageError, match="without_stages"):
        Generator(Model.on(piped, mesh.make(piped)))
