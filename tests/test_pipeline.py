"""Pipeline stages in a whole run: the numbers of one device, one model on every mesh, and what they cost."""

import functools
import re

import jax
import numpy as np
import pytest

from shardformer import checkpoint, config, mesh, specs
from shardformer.errors import UsageError
from shardformer.model import Model
from shardformer.report import collectives, memory, verify
from shardformer.sample import Generator
from shardformer.shards import pipeline
from shardformer.training.step import Trainer
from tests import runs, shared, test_parity

GPT = "learned width no-bias sequential rmsnorm dropout unrolled"
T5 = "t5 tied biases parallel dropout remat"
ROWS = (
    ("1x2x4", "", {"accum": 4}),
    ("2x2x2", T5, {"accum": 4, "zero": 1}),
    ("1x1x8", GPT, {"accum": 8}),
    ("4x1x2", GPT, {"accum": 2, "zero": 3}),
    ("1x2x4", T5, {"accum": 4, "pipeline_rounds": 2}),
    ("2x2x2", "", {"accum": 4, "zero": 1, "pipeline_rounds": 4, "attention": "blocks"}),
)


@functools.cache
def one_device(words):
    return test_parity.results(mesh="1x1", layers=8, accum=4, **test_parity.overrides_of(words))


@pytest.mark.parametrize(("shape", "words", "options"), ROWS)
def test_stages_give_the_numbers_of_one_device(shape, words, options):
    losses, grads = one_device(words)
    overrides = {"layers": 8, **test_parity.overrides_of(words), **options}
    got_losses, got_grads = test_parity.results(mesh=shape, **overrides)
    off = np.abs(got_losses / losses - 1)
    measured = {"loss": off[0], "gradient": test_parity.worst_leaf(got_grads, grads), "after 20 steps": off[-1]}
    print(f"{shape} {options} {words}: {measured}")
    for what, bound in test_parity.F32.items():
        assert measured[what] <= bound, f"{what} is off by {measured[what]:.2e}, at most {bound}"


# The mistakes that this would find.


def differences(shape="1x1x2"):
    settings = shared.tiny(mesh=shape, accum=2, batch=4)
    dense = Model(settings.replace(mesh="1x1"), mesh.make(settings.replace(mesh="1x1")))
    parameters, batch = shared.on_host(dense.init(0)), shared.batch(rows=4)
    found = [verify.loss_and_gradients(m, parameters, batch)[:2] for m in (dense, Model(settings, mesh.make(settings)))]
    return [row for row in verify.compare_loss_and_gradients(*found) if not row.passes]


def test_gradients_that_the_stages_do_not_share_are_refused(monkeypatch):
    monkeypatch.setattr(pipeline, "mean", lambda grads: grads)
    with pytest.raises(ValueError, match=re.escape("out_specs")):
        differences()


def test_a_mean_over_too_few_rows_is_seen(monkeypatch):
    assert not differences()
    mean = pipeline.mean
    monkeypatch.setattr(pipeline, "mean", lambda grads: jax.tree.map(lambda g: 2 * g, mean(grads)))
    assert {row.name for row in differences()} >= {"transformer/layers/q", "transformer/head/w"}


# One model, one file.


PIPED = {"mesh": "2x2x2", "layers": 8, "accum": 2, "batch": 8, "zero": 1, "ema": 0.9, "pipeline_rounds": 2}


def same(a, b):
    return all(np.array_equal(x, y) for x, y in zip(*map(jax.tree.leaves, (a, b)), strict=True))


def test_a_seed_is_one_model_and_each_stage_holds_its_layers_alone():
    t = shared.trainer(**PIPED)
    params = t.model.init(7)
    assert same(shared.on_host(params), shared.on_host(shared.trainer(mesh="1x1", layers=8).model.init(7)))
    for leaf in jax.tree.leaves(params["transformer/layers"]):
        assert {shard.data.shape[0] for shard in leaf.addressable_shards} == {4}
    predicted = memory.predict_bytes(t.config)
    state = t.init()
    for device in jax.devices():
        shards = [s for leaf in jax.tree.leaves(state.params) for s in leaf.addressable_shards if s.device == device]
        assert sum(shard.data.nbytes for shard in shards) == predicted.parameters


def test_a_checkpoint_does_not_know_its_stages(tmp_path):
    """From stages to none and back, bitwise."""
    t = shared.trainer(**PIPED)
    state, _ = t.step(t.init(), shared.batch(), 0)
    expected = shared.on_host(state)
    plain = shared.trainer(mesh="1x2", layers=8, ema=0.9)
    restored = checkpoint.restore(checkpoint.save(tmp_path / "piped", 1, state, {}), plain.abstract)
    assert same(shared.on_host(restored), expected)
    again = checkpoint.restore(checkpoint.save(tmp_path / "plain", 1, restored, {}), t.abstract)
    assert same(shared.on_host(again), expected)
    assert again.params["transformer/layers"]["q"].sharding == t.shardings.params["transformer/layers"]["q"]


PIPED_RUN = ("tiny", "steps=2", "decay_steps=4", "eval_every=2", "save_every=2", "accum=2", "dropout=0.1")


def test_a_run_goes_on_without_stages_and_with_them_again(tmp_path, text, capsys):
    """And is evaluated with stages, and sampled from, at its end, on the same devices."""
    plain, out = tmp_path / "plain", tmp_path / "piped"
    assert runs.train(*PIPED_RUN, "mesh=4x1", f"data={text}", f"out={plain}") == 0
    assert runs.train("--resume", plain, "steps=4") == 0
    assert runs.train(*PIPED_RUN, "mesh=2x1x2", f"data={text}", f"out={out}", sample=True) == 0
    assert "it writes:" in capsys.readouterr().out
    assert runs.train("--resume", out, "mesh=4x1", "steps=3") == 0
    assert runs.train("--resume", out, "mesh=1x2x2", "steps=4") == 0
    columns = [[[float(row[key]) for row in runs.rows(each)] for key in ("loss", "grad_norm")] for each in (plain, out)]
    assert columns[1][0] == pytest.approx(columns[0][0], rel=1e-5)
    assert columns[1][1] == pytest.approx(columns[0][1], rel=1e-4)
    validation = [[float(row["val_loss"]) for row in runs.rows(each) if row.get("val_loss")] for each in (plain, out)]
    assert validation[1] == pytest.approx(validation[0], rel=1e-5)


def test_sampling_takes_a_mesh_without_stages():
    piped = shared.tiny(**PIPED)
    folded = piped.without_stages()
    assert (folded.mesh, folded.zero, folded.devices) == ("4x2", 3, 8)
    with pytest.raises(UsageError, match="without_stages"):
        Generator(Model(piped, mesh.make(piped)))
