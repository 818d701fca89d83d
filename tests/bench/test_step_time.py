"""Tests of `bench step` and its relatives: what they measure, and which settings they reject."""

import dataclasses
import itertools
import json
import math
import re
import sys

import jax
import pytest

from shardformer.__main__ import main
from shardformer.analysis.verify import random_batch
from shardformer.bench import (
    command_line,
    contenders,
    costs,
    generation,
    matmul_ceiling,
    reference,
    scaling,
    step_time,
    xmap_twin,
)
from shardformer.config import FIELDS
from shardformer.config.model_keys import ModelKeys
from shardformer.errors import RunError, UsageError
from shardformer.training.trainer import Trainer
from tests import shared


@pytest.mark.parametrize(
    ("changes", "fix"),
    [
        ({"optimizer": "muon"}, "optimizer=adamw"),
        ({"ema": 0.9}, "ema=0"),
        ({"lr_rules": "bias=2x"}, "lr_rules="),
        ({"lora_rank": 2}, "lora_rank=0"),
        ({"accum": 2}, "accum=1"),
        ({"dropout": 0.1, "positions": "t5"}, "dropout=0 positions=rotary"),
        ({"embed": "bias"}, "embed=plain"),
        ({"param_dtype": "bfloat16", "dtype": "bfloat16"}, "param_dtype=float32"),
        ({"moment_dtype": "bfloat16"}, "moment_dtype=float32"),
        ({"activation": "silu", "block": "parallel_two_norms"}, "activation=gelu block=parallel"),
    ],
)
def test_plain_step_rejects_settings_it_lacks(changes, fix):
    with pytest.raises(UsageError, match=f"give {fix}$"):
        reference.check(shared.tiny(**changes))


def test_plain_step_knows_every_key_of_the_model():
    """The reference would compute another model with a key that it does not know."""
    implemented = {"norm_eps", "tied", "rotary_dims", "rotary_theta", "rotary_scaling", "init_std"}
    sizes = {"layers", "d_model", "heads", "d_ff", "seq", "vocab", "vocab_multiple"}
    # They need window=, query_growth= and kv_latent=.
    without_effect = {"window_chunks", "window_rotary_theta", "query_growth_tokens", "q_latent", "value_dim"}
    keys = {field.name for field in dataclasses.fields(ModelKeys)}
    assert keys - reference.PLAIN.keys() - reference.IMPLEMENTED.keys() == implemented | sizes | without_effect


def test_plain_step_accepts_any_mesh_and_zero():
    reference.check(shared.tiny(mesh="4x2", zero=3, remat="full", scan=False))


@pytest.mark.slow
@pytest.mark.parametrize(("mode", "used"), [("scan", {"OneProgram._program"}), ("multisteps", {"MultiSteps._program"}),
                                            ("manual", {"Manual.add", "Manual.finish"})])  # fmt: skip
def test_step_runs_in_its_accumulation_mode(mode, used, monkeypatch):
    calls = set()

    class Watched(Trainer):
        def __init__(self, *args):
            super().__init__(*args)
            mode = self.accumulation
            for name in {"_program", "add", "finish"} & vars(mode).keys():
                setattr(mode, name, watched(f"{type(mode).__name__}.{name}", getattr(mode, name)))

    def watched(name, compiled):
        def call(*args):
            calls.add(name)
            return compiled(*args)

        call.lower = compiled.lower
        return call

    monkeypatch.setattr(contenders, "Trainer", Watched)
    settings = shared.tiny(mesh="1x1", accum=2, accum_mode=mode)
    ours = contenders.ours(settings, contenders.RepeatedBatch(random_batch(settings)), mode)
    assert not calls
    assert math.isfinite(ours.run(1))
    assert calls == used
    assert len(ours.programs) == len(used)


@pytest.mark.parametrize(
    ("batch", "parts", "told"), [(16, 16, "16 x 16"), (12, 16, "64 x 16"), (12, 48, "192 x 16"), (12, 4, "12 x 16")]
)
def test_indivisible_batch_is_replaced_and_reported(batch, parts, told):
    base = shared.tiny(mesh="1x1", batch=batch)
    settings = costs.with_batch(base, parts)
    assert settings.training.batch % parts == 0
    why = "" if settings.training.batch == batch else " (batch=12 does not divide into the parts)"
    assert costs.title(contenders.Measuring(preset="tiny"), settings, base) == f"tiny: {told} tokens a step{why}"


@pytest.mark.slow
def test_bench_zero_prints_the_temporary_bytes(capsys):
    command_line.main(["zero", "preset=tiny", "mesh=4x1", "layers=6", "d_model=128", "seq=4", "batch=4"])
    title, header, *rows = capsys.readouterr().out.splitlines()
    assert title.startswith("tiny: 4 x 4 tokens a step, on one device")
    columns = re.split(r"\s{2,}", header)
    at = [columns.index(name) for name in ("parameters MB", "optimizer MB", "peak temporary MB")]
    needed = [[float(row.split()[i]) for i in at] for row in rows]
    none, once, by_layer = map(sum, needed)
    assert by_layer < once < none
    assert needed[2][2] < needed[0][2]
    assert needed[2][2] < needed[1][2]  # all parameters, which are gathered at once


SMALL = ("preset=tiny", "mesh=4x2", "block=sequential", "positions=learned", "tied=true", "rounds=1", "turn=1")


@pytest.mark.slow
@pytest.mark.usefixtures("promotion")
def test_every_peer_computes_the_same_loss(capsys, tmp_path):
    """vocab=65 is padded, and the rows of both shards of the vocabulary are looked up."""
    peers = "peers=plain,partitioned,xmap,products"
    command_line.main(["step", *SMALL, peers, f"json={tmp_path}/step.json", f"picture={tmp_path}/step.png"])
    said = capsys.readouterr().out
    assert re.search(r"first losses agree to (0e\+00|\de-0[6-9])$", said.strip())
    assert "MFU = tokens/s x (6 x multiplying parameters" in said
    steps = [step["step"] for step in json.loads((tmp_path / "step.json").read_text())["steps"]]
    assert steps == ["plain Haiku + optax", "partitioned 4x2", "xmap 4x2", "shardformer 4x2", "products alone 4x2"]
    assert (tmp_path / "step.png").stat().st_size > 10_000


@pytest.mark.slow
@pytest.mark.usefixtures("promotion")
def test_peer_with_another_model_fails(broken):
    broken(xmap_twin, "leave", lambda x: x)
    with pytest.raises(RunError, match="these are not the same model; the first losses are: xmap 4x2 "):
        command_line.main(["step", *SMALL, "layers=1", "peers=xmap"])


def test_impossible_peer_is_rejected_or_named(capsys):
    with pytest.raises(UsageError, match="got 'plane'; did you mean 'plain'"):
        command_line.main(["step", "peers=plane"])
    with pytest.raises(UsageError, match=r"peers=xmap: .* give dropout=0"):
        command_line.main(["step", "peers=xmap", "dropout=0.1"])
    c = shared.tiny(mesh="1x1", ema=0.5)
    names = step_time.choose_peers(contenders.Measuring(), lambda name: step_time.why_not(name, c))
    assert names == ["products"]
    assert "without plain: " in capsys.readouterr().out


@pytest.mark.parametrize("mesh", ["1x1", "4x2"])
def test_products_are_those_of_parameters_and_attention(mesh):
    c = shared.tiny(mesh=mesh)
    tokens, D = c.training.batch * c.model.seq, c.model.d_model
    matrices = c.model.layers * 12 * D * D + D * c.model.padded_vocab
    assert matmul_ceiling.count_flops(c) == 6 * tokens * (matrices + c.model.layers * 2 * c.model.seq * D)


def test_products_of_windowed_layers_count_their_windows():
    def count(**overrides):
        return matmul_ceiling.count_flops(shared.tiny(mesh="1x1", layers=4, seq=64, **overrides))

    c = shared.tiny(mesh="1x1", layers=4, seq=64)
    half = (
        6 * c.training.batch * c.model.seq * c.model.layers * 2 * (c.model.seq // 2) * c.model.d_model
    )  # of the attention, with 32 of 64 keys
    assert count() - count(window=32) == half
    assert count() - count(window=32, window_pattern="wf") == half // 2
    assert count() == count(window=64) == count(window=100)


def test_an_exponent_is_a_slope_between_logarithms():
    assert scaling.fit_exponent((1, 2, 4), (3.0, 12.0, 48.0)) == pytest.approx(2)


@pytest.mark.slow
def test_a_mesh_that_is_found_is_measured(monkeypatch, capsys):
    monkeypatch.setattr(scaling, "measure_growth", lambda settings, _: [settings[0].parallel.mesh] * 6)
    command_line.main(["scaling", "preset=tiny", "mesh=auto"])
    assert "mesh 8x1; medians" in capsys.readouterr().out
    monkeypatch.setattr(generation.Model, "on", lambda settings, _: sys.exit(settings.parallel.mesh))
    with pytest.raises(SystemExit, match=r"^8x1$"):
        command_line.main(["generate", "preset=tiny", "seq=32", "mesh=auto", "tokens=2"])


def test_a_bench_takes_microbatches_as_a_number():
    with pytest.raises(UsageError, match=r"give accum=1$"):
        command_line.main(["zero", "preset=tiny", "accum=auto"])


def test_a_loss_that_is_nan_is_not_the_same_loss():
    with pytest.raises(RunError, match="not the same model"):
        step_time.check_same_loss({"plain": 4.17, "shardformer": math.nan}, shared.tiny())


def test_peak_of_a_data_sheet_is_bfloat16_for_any_dtype(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    for dtype in ("float32", "bfloat16"):
        said = step_time._explain_mfu(shared.tiny(dtype=dtype), 989e12)
        assert said.endswith("989.000 TFLOP/s (bfloat16 by the data sheet)")


def test_bench_zero_has_no_ideal_for_stages():
    with pytest.raises(UsageError, match=r"without pipeline stages: give mesh=4x1; got mesh=2x1x2$"):
        command_line.main(["zero", "preset=tiny", "mesh=2x1x2", "accum=2"])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            "mesh mesh=4x2 meshes=1x1 peers=nonsense",
            "bench mesh does not read mesh, peers: mesh= is read by bench step, race, scaling, accumulation, zero, "
            "generate, kernel; peers= is read by bench step, race, generate; leave them out",
        ),
        ("step meshes=1x1", "meshes= is read by bench mesh"),
        ("scaling json=x.json", "json= is read by bench step, race, mesh; leave it out"),
        ("accumulation picture=x.png accum=4 accum_mode=manual", "does not read picture, accum, accum_mode: "),
        ("zero zero=3 turn=2", "does not read zero, turn: "),
        (
            "checkpoint mesh=1x1 layers=2 d_model=32 heads=2 d_ff=64 json=x",
            "read mesh, layers, d_model, heads, d_ff, json: ",
        ),
        ("generate json=x picture=x.png mb=5", "does not read json, picture, mb: "),
    ],
)
def test_unread_key_is_rejected_with_its_readers(words, message, capsys, monkeypatch):
    monkeypatch.setattr(command_line, "BENCHES", dict.fromkeys(command_line.BENCHES, lambda *_: None))  # takes anything
    assert main(["bench", *words.split()]) == 2
    assert message in capsys.readouterr().err


def test_every_measuring_key_has_a_reader():
    assert set(itertools.chain(*command_line.READ.values())) == set(contenders.Measuring.__dataclass_fields__)
    assert set(command_line.READ) == set(command_line.BENCHES)
    assert set(itertools.chain(*command_line.SET.values())) <= set(FIELDS)


@pytest.mark.parametrize(
    "words",
    ["step json=x picture=y", "step heads=8 batch=16 peers=torch_compile", "zero scan=true batch=8 accum=2",
     "mesh json=x", "generate rows=1,16 tokens=48 rounds=3", "checkpoint out=s3://BUCKET/FOLDER",
     "checkpoint mb=2 unknown=1"],
)  # fmt: skip
def test_read_and_unknown_keys_pass(words):
    name, *keys = words.split()
    command_line.reject_unread(name, [key.partition("=")[0] for key in keys])
