"""Runs with bad batches: steps are left out, the run goes back to a checkpoint, and resumes are bitwise."""

import csv
import json
import sys

import pytest

from shardformer import checkpoint
from tests import runs
from tests.launch import QUICK_COMPILATION, WITHOUT_LUXURY, Forked, finished, free_port
from tests.training.bad_batches import NAN, SPIKE, bad_batches
from tests.training.uneven_run import contents

STEPS = 60
BAD = {21: NAN, 24: SPIKE, 25: NAN, 31: SPIKE, 32: NAN, 33: SPIKE, 34: NAN, 35: SPIKE, 45: NAN}


def guarded_words(text, out, steps: int = STEPS, lr: float = 1e-2, every: int = 20):
    return ("tiny", "mesh=2x1", f"data={text}", f"out={out}", f"steps={steps}", f"decay_steps={steps}",
            f"eval_every={every}", "eval_batches=2", f"save_every={every // 2}", f"lr={lr}", "warmup=4",
            "skip_steps=6")  # fmt: skip


def skipped(out) -> list[dict]:
    with open(out / "skipped.csv", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def spoilt(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("spoilt") / "run"
    with bad_batches(BAD):
        assert runs.train(*guarded_words(text, out)) == 0
    return out


@pytest.mark.slow
def test_bad_steps_are_left_out_and_counted(spoilt):
    assert [int(row["step"]) for row in skipped(spoilt)] == list(BAD)
    assert [float(row["in_row"]) for row in skipped(spoilt)] == [1, 1, 2, 1, 2, 3, 4, 5, 1]
    assert float(skipped(spoilt)[-1]["skipped"]) == len(BAD)


@pytest.mark.slow
@pytest.mark.parametrize("stop", [24, 32, 37])
def test_resume_through_skips_and_a_rollback_is_bitwise(tmp_path, text, spoilt, stop, capsys):
    out = tmp_path / "run"
    with bad_batches(BAD):
        assert runs.train(*guarded_words(text, out), stop_after=stop) == 0
        assert runs.train("--resume", out) == 0
    said = capsys.readouterr().out
    assert "5 steps in a row up to step 35 were left out: the run goes back to the weights of step 20" in said
    assert contents(out, STEPS) == contents(spoilt, STEPS)
    assert runs.rows(out) == runs.rows(spoilt)
    assert (out / "skipped.csv").read_text() == (spoilt / "skipped.csv").read_text()


@pytest.mark.slow
def test_too_many_rollbacks_end_the_run(tmp_path, text, capsys):
    out = tmp_path / "run"
    with bad_batches(dict.fromkeys(range(31, 51), NAN)):
        assert runs.train(*guarded_words(text, out), "keep=5") == runs.FAILED
    captured = capsys.readouterr()
    assert "the run goes back to the weights of step 20 and continues after step 35 (1 of at most 3)" in captured.out
    assert "the run goes back to the weights of step 10 and continues after step 40 (2 of at most 3)" in captured.out
    assert "the run goes back to the weights of step 0 and continues after step 45 (3 of at most 3)" in captured.out
    assert "up to step 50 were left out, and the run has gone back 3 times. A smaller lr" in captured.err
    assert runs.train("--resume", out, "skip_steps=0") == 0
    assert "guard" not in (checkpoint.step_folder(out, STEPS) / "manifest.json").read_text()


TWENTY = {step: (NAN, SPIKE)[step % 2] for step in range(40, 800, 39)}


@pytest.fixture(scope="module")
def clean_loss(tmp_path_factory):
    """Returns the words of 800 steps without a folder, and the final loss without a bad step."""
    folder = tmp_path_factory.mktemp("clean")
    words = guarded_words(runs.text(folder, 100_000), "", steps=800, lr=5e-3, every=200)
    words = [word for word in words if word != "out="]
    with bad_batches({}):  # the guard of the bad runs, without a bad step
        assert runs.train(*words, f"out={folder / 'run'}") == 0
    return words, final_loss(folder / "run")


def final_loss(out) -> float:
    return json.loads((out / "final.json").read_text())["validation"]["loss"]


@pytest.mark.nightly
def test_twenty_bad_steps_hardly_change_the_loss(tmp_path, clean_loss):
    words, expected = clean_loss
    with bad_batches(TWENTY):
        assert runs.train(*words, f"out={tmp_path / 'run'}") == 0
    assert len(TWENTY) == 20
    assert {*TWENTY} <= {int(row["step"]) for row in skipped(tmp_path / "run")}
    assert final_loss(tmp_path / "run") == pytest.approx(expected, rel=0.005)


@pytest.mark.slow
def test_without_the_key_a_bad_step_ends_the_run(tmp_path, text, capsys):
    """The negative twin; the message names the layer."""
    words = [word for word in guarded_words(text, tmp_path / "run") if not word.startswith("skip")]
    with bad_batches(BAD):
        assert runs.train(*words) == runs.FAILED
    said = capsys.readouterr().err
    assert "step 21: loss is nan" in said
    assert "; the first non-finite gradient is that of transformer/head/bias" in said
    assert checkpoint.list_steps(tmp_path / "run")[-1] == 20


def train_by_two(bad: dict[int, str], *words) -> str:
    """Trains by two processes with these bad steps; returns what the first one said."""
    program = f"{WITHOUT_LUXURY}\nfrom tests.training.bad_batches import bad_batches\n"
    program += f"with bad_batches({bad}):\n    sys.exit(main())"
    words = ("train", *words, f"coordinator=localhost:{free_port()}", "processes=2")
    environment = {
        "PYTHONPATH": ":".join(sys.path),
        "XLA_FLAGS": f"{QUICK_COMPILATION} --xla_force_host_platform_device_count=1",
    }
    started = [Forked(*words, f"process_id={i}", program=("-c", program), environment=environment) for i in (0, 1)]
    results = [finished(process) for process in started]
    assert [status for status, *_ in results] == [0, 0], results
    return results[0][1]


@pytest.fixture(scope="module")
def spoilt_by_two(tmp_path_factory, text):
    """Returns the folder of a run by two processes, and what it said."""
    out = tmp_path_factory.mktemp("by_two") / "run"
    return out, train_by_two(BAD, *guarded_words(text, out))


@pytest.mark.nightly
def test_two_processes_go_back_together(spoilt_by_two, spoilt):
    out, said = spoilt_by_two
    assert "the run goes back to the weights of step 20 and continues after step 35" in said
    got, expected = (skipped(run) for run in (out, spoilt))
    assert [row["step"] for row in got] == [row["step"] for row in expected]
    got, expected = (runs.rows(run)[-1]["loss"] for run in (out, spoilt))
    assert float(got) == pytest.approx(float(expected), rel=1e-4)


@pytest.mark.nightly
def test_two_processes_resume_bitwise_through_both(tmp_path, text, spoilt_by_two):
    """The run ends within the row of bad steps, so that its resume goes back."""
    out = tmp_path / "run"
    train_by_two(BAD, *guarded_words(text, out)[:4], "steps=32", *guarded_words(text, out)[5:])
    assert len(skipped(out)) == 5
    said = train_by_two(BAD, "--resume", out, f"steps={STEPS}")
    assert "5 steps in a row up to step 35 were left out: the run goes back to the weights of step 20" in said
    for name in ("arrays-00000-of-00002.npy", "arrays-00001-of-00002.npy"):
        got, expected = (checkpoint.step_folder(run, STEPS) / name for run in (out, spoilt_by_two[0]))
        assert got.read_bytes() == expected.read_bytes()
    assert (out / "skipped.csv").read_text() == (spoilt_by_two[0] / "skipped.csv").read_text()
