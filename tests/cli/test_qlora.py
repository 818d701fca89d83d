"""Runs that store codes: conversion, training of adapters over them, resuming, and merging."""

import functools
import json
import shutil

import jax
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.checkpoint import array_files, manifest
from shardformer.cli.generate_command import _continue
from shardformer.cli.generation_options import GenerateOptions, ServeOptions
from shardformer.cli.sample_command import load_model
from shardformer.cli.serve_command import build_service
from shardformer.config import Config
from shardformer.config.names import LAYERS
from shardformer.convert import runs as convert_runs
from shardformer.inference.generator import never_stop
from shardformer.inference.serve.jobs import make_jobs
from shardformer.layout import resolve
from shardformer.model import Model
from shardformer.training.run_folder import Run
from tests import runs, tiers
from tests.runs import USAGE

ADAPTING = ("lora_rank=2", "mesh=2x1", "zero=3", "batch=8", "steps=4", "save_every=2", "lr=0.01")


@pytest.fixture(scope="module")
def base(tmp_path_factory, trained):
    return shutil.copytree(trained, tmp_path_factory.mktemp("base") / "run")


@pytest.fixture(scope="module")
def codes(base):
    """Returns the base with weights=nf4."""
    out = base.with_name("codes")
    assert main(["convert", str(base), str(out), "weights=nf4"]) == 0
    return out


@pytest.fixture(scope="module")
def adapted(base, codes, text):
    """Returns a run of adapters over the codes."""
    out = base.with_name("adapted")
    assert runs.train(f"base={codes}", f"data={text}", *ADAPTING, f"out={out}") == 0
    return out


@pytest.fixture(scope="module")
def direct(base, text):
    """Returns the same run of adapters, whose codes are made when the base is read."""
    out = base.with_name("direct")
    assert runs.train(f"base={base}", f"data={text}", "weights=nf4", *ADAPTING, f"out={out}") == 0
    return out


def arrays(run, step=None) -> dict:
    """Returns the arrays of a run's checkpoint."""
    folder = checkpoint.step_folder(run, step or checkpoint.list_steps(run)[-1])
    stored = manifest.read_manifest(folder)
    with array_files.Reader(folder, stored) as reader:
        boxes = {name: tuple((0, size) for size in leaf.shape) for name, leaf in stored.leaves.items()}
        return {name: np.array(reader.read_slices(name, [box])[box]) for name, box in boxes.items()}


def same(a, b) -> bool:
    return a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)


def score(run, text, capsys, *words) -> float:
    document = run.parent / "document.jsonl"
    document.write_text(json.dumps({"text": text.read_text()[:2000]}) + "\n")
    capsys.readouterr()
    assert main(["score", str(run), str(document), *words]) == 0
    return json.loads(capsys.readouterr().out)["nats_per_token"]


@pytest.mark.slow
def test_stored_codes_give_the_scores_of_codes_made_when_reading(base, codes, text, capsys):
    assert Run.open(codes).config.stored.weights == "nf4"
    expected = score(base, text, capsys, "weights=nf4")
    assert score(codes, text, capsys) == expected
    assert score(codes, text, capsys, "mesh=2x2") == pytest.approx(expected, abs=2e-6)
    assert score(base, text, capsys) != expected


def test_int8_codes_of_dequantised_weights_are_the_same(base):
    first, floats, again = (base.with_name(name) for name in ("first", "floats", "again"))
    assert main(["convert", str(base), str(first), "weights=int8"]) == 0
    assert main(["convert", str(first), str(floats), "weights=float"]) == 0
    assert main(["convert", str(floats), str(again), "weights=int8"]) == 0
    before, after = arrays(first), arrays(again)
    codes = [name for name in before if name.endswith("_codes")]
    assert codes
    assert all(np.array_equal(before[name], after[name]) for name in codes)
    assert not same(arrays(floats), arrays(base))


@pytest.mark.slow
def test_training_changes_only_the_adapters(codes, adapted):
    before, first, last = arrays(codes), arrays(adapted, 2), arrays(adapted, 4)
    frozen = [name for name in before if name.startswith("params/")]
    assert all(np.array_equal(before[name], last[name]) for name in frozen)
    assert any("lora" in name and (first[name] != last[name]).any() for name in first)
    assert last["params/transformer/layers/up_codes"].dtype == np.uint8


@pytest.mark.slow
def test_codes_made_when_a_base_is_read_are_the_stored_ones(direct, adapted):
    assert same(arrays(direct), arrays(adapted))


@pytest.mark.slow
def test_resume_is_bitwise(adapted, tmp_path):
    shutil.copytree(adapted, tmp_path / "run", ignore=shutil.ignore_patterns("step_*4"))
    (tmp_path / "run" / "final.json").unlink(missing_ok=True)
    assert runs.train("--resume", tmp_path / "run") == 0
    assert same(arrays(tmp_path / "run"), arrays(adapted))


@pytest.mark.slow
def test_adapters_merge_onto_the_stored_weights(base, adapted, text, capsys):
    out = base.with_name("merged")
    assert main(["convert", str(adapted), str(out), "merge_lora=true"]) == 0
    assert "onto the stored weights" in capsys.readouterr().out
    assert score(out, text, capsys) == pytest.approx(score(adapted, text, capsys), abs=1e-6)
    assert main(["convert", str(adapted), str(base.with_name("no")), "merge_lora=true", "onto=float"]) == USAGE


@pytest.mark.slow
def test_adapters_merge_onto_the_float_weights(base, adapted, direct, text, capsys):
    onto = base.with_name("onto")
    assert main(["convert", str(direct), str(onto), "merge_lora=true", "onto=float"]) == 0
    printed = capsys.readouterr().out
    share = float(printed.partition("onto the float weights; ")[2].partition("differ by ")[2].partition("%")[0])
    assert 5 < share < 15
    assert score(onto, text, capsys) != score(adapted, text, capsys)


@pytest.mark.slow
def test_adapters_of_peft_leave_the_codes_of_their_base(codes, adapted, tmp_path, monkeypatch):
    def convert(*words) -> dict:
        assert main(["convert", *map(str, words)]) == 0
        return arrays(words[1]) if "base" in words[-1] else {}

    before = arrays(codes)
    convert(adapted, tmp_path / "peft", "format=peft")
    after = convert(tmp_path / "peft", tmp_path / "run", f"base={codes}")
    assert all(np.array_equal(before[name], after[name]) for name in before if name.startswith("params/"))
    open_state = convert_runs.open_state
    monkeypatch.setattr(convert_runs, "open_state", lambda *words, with_codes: open_state(*words))
    again = convert(tmp_path / "peft", tmp_path / "again", f"base={codes}")
    assert any(not np.array_equal(before[name], again[name]) for name in before if name.startswith("params/"))


def test_350m_stores_less_than_a_quarter_of_lora():
    """GPT-2 medium: 216 MB with nf4, 1,422 MB in float32; int8 with its scales has more than a quarter."""
    sizes = {"layers": 24, "d_model": 1024, "heads": 16, "seq": 1024, "vocab": 50257, "lora_rank": 8, "mesh": "1x1"}
    medium = Config.of(block="sequential", positions="learned", bias="all", tied=True, head_bias=False, **sizes)
    shapes = Model.abstract_parameters(medium)

    def stored_bytes(weights):
        stored = resolve(medium.replace(weights=weights)).weights.store(shapes)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(stored))

    assert stored_bytes("nf4") < stored_bytes("float") / 4 < stored_bytes("int8")


def test_other_forms_of_stored_codes_are_rejected(codes, text, capsys):
    assert main(["convert", str(codes), str(codes.with_name("x")), "weights=nf4"]) == USAGE
    assert "already" in capsys.readouterr().err
    assert main(["eval", str(codes), "weights=int8"]) == USAGE
    assert "stores weights=nf4, got weights=int8" in capsys.readouterr().err
    assert main(["train", f"base={codes}", "weights=int8", "lora_rank=2", f"out={codes.with_name('x')}"]) == USAGE
    assert "contradicts" in capsys.readouterr().err
    assert main(["train", f"base={codes}", f"out={codes.with_name('x')}"]) == USAGE
    assert "give lora_rank" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "form", "mesh"), [("base", "int8", "1x1"), tiers.at_night(("adapted", "auto", "2x4"))]
)
def test_served_bits_are_those_of_generate(request, name, form, mesh):
    """Alone, among others that come and go, and by `generate`."""
    run, prompts = Run.open(request.getfixturevalue(name)), [[1, 2, 3], [4], [5, 6]]
    options = GenerateOptions(tokens=5, temperature=2.0, seed=1, batch=2, mesh=mesh, weights=form)
    service, (served,) = build_service(run, ServeOptions(batch=2, mesh=mesh, weights=form))
    engine = service.thread.engine
    make = functools.partial(make_jobs, sampling=options, weights=served.served.weights)
    alone = [next(engine.run(make([prompt]))).result() for prompt in prompts]
    jobs = list(make(prompts))
    for job in reversed(jobs):
        engine.submit(job)
        engine.step(count=1)
    while not engine.idle:
        engine.step(count=1)
    assert [job.result() for job in jobs] == alone
    model, params = load_model(run, options)
    found = list(_continue(model, params, prompts, options, len(run.vocabulary), never_stop, 0))
    assert found == alone
    assert len({tuple(row.logprobs) for row in found}) == 3
    assert "up_codes" in served.served.weights.unstacked[LAYERS]
