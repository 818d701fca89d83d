"""`weights=` on the command line: the loss that it costs, its commands, and what rejects it."""

import json

import jax
import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.checkpoint import StoredLeaf, restoring
from shardformer.config.names import LAYERS
from shardformer.layout import mesh
from shardformer.model import Model
from shardformer.quantized import int8_matrix, packed_matrix, quantized_reading
from shardformer.training.run_folder import Run
from tests import runs, tiers
from tests.runs import USAGE

MOST = 1.005  # the loss with int8 weights, as a multiple of that with float weights
MOST_4_BITS = 0.001  # of this model, whose layers have learned so little that turning their signs changes 0.2%


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("quantized") / "run"
    words = ("tiny", "mesh=1x1", f"data={text}", "steps=100", "eval_every=100", "ema=0.9", f"out={out}")
    assert runs.train(*words) == 0
    return out


@pytest.fixture(scope="module")
def document(tmp_path_factory, text):
    path = tmp_path_factory.mktemp("document") / "text.jsonl"
    path.write_text(json.dumps({"text": text.read_text()[:3000]}) + "\n")
    return path


@pytest.fixture
def score(run, document, capsys):
    """Returns a function that scores the document with these words; its result is in nats per token."""

    def measure(*words) -> float:
        capsys.readouterr()
        assert main(["score", str(run), str(document), *words]) == 0
        return json.loads(capsys.readouterr().out)["nats_per_token"]

    return measure


@pytest.mark.slow
def test_loss_changes_by_at_most_half_a_percent(score, monkeypatch):
    exact, small = score(), score("weights=int8")
    assert 1 < exact < 3.5  # it has learned
    assert exact != small
    assert abs(small / exact - 1) < MOST - 1
    quantize = int8_matrix.quantize

    def double_scales(w, axis):
        codes, scales = quantize(w, axis)
        return codes, 2 * scales

    monkeypatch.setattr(int8_matrix, "quantize", double_scales)
    assert abs(score("weights=int8") / exact - 1) > MOST - 1  # this young model even gains from larger logits


@pytest.mark.nightly
@pytest.mark.parametrize("form", ["int4", "nf4"])
def test_loss_changes_little_with_4_bits(score, form, monkeypatch):
    exact, small = score(), score(f"weights={form}")
    assert exact != small
    assert abs(small / exact - 1) < MOST_4_BITS
    multiply = packed_matrix.multiply

    def flip_signs(x, w):
        return -multiply(x, w)

    monkeypatch.setattr(packed_matrix, "multiply", flip_signs)
    assert abs(score(f"weights={form}") / exact - 1) > MOST_4_BITS


@pytest.mark.nightly
def test_score_is_the_same_on_every_mesh_and_for_an_average(score):
    assert score("weights=int8", "mesh=2x2") == pytest.approx(score("weights=int8"), abs=2e-6)
    average = score("weights=int8", "ema=true")
    assert average == pytest.approx(score("ema=true"), rel=MOST - 1)
    assert average != score("weights=int8")


@pytest.mark.slow
def test_eval_accepts_it(run, capsys):
    assert main(["eval", str(run), "weights=int8", "split=validation", "mesh=2x2"]) == 0
    assert "validation" in capsys.readouterr().out


def test_each_parameter_is_quantised_before_the_next_is_read(trained, monkeypatch):
    events, read, store = [], restoring._read_onto_devices, Model.store_leaf

    def log_read(reader, name, *args):
        events.append(("read", name.removeprefix("params/")))
        return read(reader, name, *args)

    def log_store(model, name, leaf):
        events.append(("store", name))
        return store(model, name, leaf)

    monkeypatch.setattr(restoring, "_read_onto_devices", log_read)
    monkeypatch.setattr(Model, "store_leaf", log_store)
    opened = Run.open(trained)
    config = opened.config.for_inference("1x1").replace(weights="int8")
    model = Model.on(config, mesh.make(config))
    params = opened.restore_params(model)[1]
    assert events[::2] == [("read", name) for _, name in events[1::2]]
    assert events[1::2] == [("store", name) for _, name in events[1::2]]
    assert jax.tree.structure(params) == jax.tree.structure(model.shapes)
    assert params[LAYERS]["up_codes"].dtype == np.int8


def read_weights(run, form, shape) -> dict:
    """Returns the parameters of a run with weights in this form, by name."""
    opened = Run.open(run)
    config = opened.config.for_inference(shape).replace(weights=form)
    params = opened.restore_params(Model.on(config, mesh.make(config)))[1]
    return {f"{module}/{name}": np.asarray(leaf) for module, part in params.items() for name, leaf in part.items()}


def find_differences(found, expected) -> set[str]:
    assert found.keys() == expected.keys()
    return {name for name, leaf in expected.items() if not np.array_equal(found[name], leaf)}


@pytest.mark.parametrize(
    ("form", "shape", "table"), tiers.shorten([("int8", "1x1", {("embed/tokens", 10)}), ("nf4", "1x2", set())])
)
def test_codes_made_of_a_few_rows_at_a_time_are_the_same(trained, form, shape, table, monkeypatch):
    """A layer's matrix at a time, and 10 rows of a table that mp does not split; its last two blocks share some."""
    whole, blocks, read = read_weights(trained, form, shape), set(), StoredLeaf.read_rows

    def log_rows(leaf, first, count):
        blocks.add((leaf.name.removeprefix("params/transformer/"), count))
        return read(leaf, first, count)

    monkeypatch.setattr(quantized_reading, "BLOCK", 4 * 32 * 10)
    monkeypatch.setattr(StoredLeaf, "read_rows", log_rows)
    assert not find_differences(read_weights(trained, form, shape), whole)
    assert blocks == {(f"layers/{name}", 1) for name in ("q", "k", "v", "o", "up", "down")} | table

    monkeypatch.setattr(StoredLeaf, "read_rows", lambda leaf, first, count: read(leaf, 0, count))
    assert f"{LAYERS}/up_codes" in find_differences(read_weights(trained, form, shape), whole)


@pytest.mark.parametrize(("command", "reason"), [("train", "has no gradient"), ("verify", "a dense model of float")])
def test_commands_with_gradients_reject_it(command, reason, capsys):
    assert main([command, "tiny", "weights=int8", "mesh=2x1"]) == USAGE
    message = capsys.readouterr().err
    assert "weights=int8" in message
    assert reason in message


def test_unknown_form_is_rejected(trained, document, capsys):
    assert main(["score", str(trained), str(document), "weights=int7"]) == USAGE
    assert "int8" in capsys.readouterr().err


def test_show_prints_the_bytes_of_codes_and_scales(capsys):
    def parameters(*words) -> float:
        assert main(["show", "tiny", "mesh=1x1", "d_model=128", *words]) == 0
        line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("parameters "))
        number, unit = line.split()[1:3]
        return float(number) * {"kB": 1e3, "MB": 1e6}[unit]

    assert 0.25 < parameters("weights=int8") / parameters() < 0.28
