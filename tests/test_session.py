"""A run from Python: what a notebook calls."""

import itertools

import numpy as np
import pytest

import shardformer
from shardformer import OwnBatches, Session, UsageError, preset
from shardformer.training.trainer import Trainer
from tests import runs

VOCAB, BATCH, SEQ = 11, 8, 16
KEYS = {"mesh": "4x2", "vocab": VOCAB, "steps": 4, "decay_steps": 4, "save_every": 2, "eval_every": 2}


def make_batch(step: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(step).integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def own_batches(**options) -> OwnBatches:
    return OwnBatches(lambda first: map(make_batch, itertools.count(first)), VOCAB, **options)


def create(tmp_path, corpus, **keys) -> Session:
    return Session.create(preset("tiny", **KEYS | {"out": str(tmp_path / "run")} | keys), corpus)


@pytest.fixture
def shared_programs(monkeypatch):
    runs.share_trainers(monkeypatch)


class Sink:
    def __init__(self):
        self.rows, self.closed = [], False

    def write(self, row):
        self.rows.append(row)

    def close(self):
        self.closed = True


@pytest.mark.slow
def test_run_of_a_preset_takes_three_lines(tmp_path, text, capsys):
    session = Session.create(preset("tiny", mesh="2x1", data=str(text), steps=2, warmup=1, out=str(tmp_path / "run")))
    trained = session.train()
    losses = trained.evaluate()
    assert trained.best.step == 2
    model, params, step = trained.load_best()
    assert (step, params.keys()) == (2, model.abstract.keys())
    assert not trained.stopped
    assert "validation" in losses
    assert "mesh 2x1" in capsys.readouterr().out
    assert (tmp_path / "run/final.json").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_own_batches_train_and_resume_bitwise(tmp_path):
    create(tmp_path / "one", own_batches(validation=[make_batch(99)])).train()
    create(tmp_path / "two", own_batches(validation=[make_batch(99)]), steps=2).train()
    resumed = Session.resume(tmp_path / "two/run", own_batches(validation=[make_batch(99)]), steps=4)
    trained = resumed.train()
    assert trained.best.step > 0
    assert runs.rows(tmp_path / "one/run")[-1] == runs.rows(tmp_path / "two/run")[-1]


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_other_batches_change_the_losses(tmp_path):
    create(tmp_path / "one", own_batches(), steps=1).train()
    shifted = OwnBatches(lambda first: map(make_batch, itertools.count(first + 7)), VOCAB)
    create(tmp_path / "two", shifted, steps=1).train()
    one, two = (runs.rows(tmp_path / name / "run")[-1]["loss"] for name in ("one", "two"))
    assert one != two


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_sink_receives_the_logged_rows(tmp_path):
    sink = Sink()
    create(tmp_path, own_batches(), steps=3).train(sink=sink)
    assert [row["step"] for row in sink.rows] == [1, 2, 3]
    assert sink.closed


def test_resume_asks_for_own_batches_again(tmp_path):
    create(tmp_path, own_batches(name="mine")).run.write_documents()
    with pytest.raises(UsageError, match=r"run was trained on batches that a program supplied, own:mine; supply them"):
        Session.resume(tmp_path / "run")


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_own_evaluation_replaces_the_validation(tmp_path):
    losses = iter([3.0, 1.0, 2.0])
    trained = create(tmp_path, own_batches(), steps=3, eval_every=1).train(evaluate=lambda params: next(losses))
    assert trained.best == (2, 1.0)


def test_own_batches_of_a_wrong_shape_are_rejected(tmp_path, monkeypatch):
    monkeypatch.setattr(Trainer, "lower", lambda *_: [])  # it starts before the first batch is read
    batches = OwnBatches(lambda first: itertools.repeat({"tokens": np.zeros((BATCH, 3), np.int32)}), VOCAB)
    with pytest.raises(UsageError, match=r"tokens has the shape \(8, 3\), expected \(batch, seq\) = \(8, 16\)"):
        create(tmp_path, batches).train()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_ended_iterator_of_batches_is_reported(tmp_path):
    batches = OwnBatches(lambda first: iter([make_batch(0)]), VOCAB)
    with pytest.raises(UsageError, match="the iterator of batches ended at step 1; give steps=1, or more batches"):
        create(tmp_path, batches).train()


@pytest.mark.slow
@pytest.mark.usefixtures("shared_programs")
def test_resume_with_other_batches_is_rejected(tmp_path):
    create(tmp_path, own_batches(), steps=2).train()
    with pytest.raises(UsageError, match="is not what"):
        Session.resume(tmp_path / "run", own_batches(name="others"), steps=4)


def test_epochs_are_counted_from_the_data_again_on_resume(tmp_path, text):
    """18,000 characters are 1,124 rows of 16 targets."""
    keys = {"mesh": "1x1", "data": str(text), "batch": 8, "out": str(tmp_path / "run")}
    session = Session.create(preset("tiny", epochs=2.0, **keys))
    assert session.run.config.training.steps == 281
    session.run.write_documents()
    assert Session.resume(tmp_path / "run").run.config.training.steps == 281
    longer = Session.resume(tmp_path / "run", epochs=3.0)
    assert (longer.run.config.training.steps, longer.previous.training.steps) == (422, 281)
    assert Session.resume(tmp_path / "run", epochs=0.0, steps=500).run.config.training.steps == 500
    with pytest.raises(UsageError, match="steps=500 and epochs=2 both choose the length of the run"):
        Session.resume(tmp_path / "run", steps=500)


def test_package_lists_the_names_that_it_imports_late():
    assert {"Session", "Task", "OwnBatches", "Config"} <= set(dir(shardformer))
