"""`train base=RUN/step_N`: a new run that continues a checkpoint of another run."""

import re

import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from tests import runs
from tests.training.uneven_run import contents

FULL, FORK = 24, 12


def wsd_words(text, steps: int):
    return ("tiny", "mesh=2x1", f"data={text}", "schedule=wsd", f"steps={steps}", f"decay_steps={steps}", "decay=6",
            "dropout=0.2", "ema=0.9", "log_every=3", "eval_every=8", "eval_batches=2", f"keep_every={FORK}",
            "lr=1e-2", "warmup=4")  # fmt: skip


def snapshot(folder) -> dict:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("wsd") / "run"
    assert runs.train(*wsd_words(text, FULL), f"out={out}") == 0
    return out


@pytest.fixture(scope="module")
def source(tmp_path_factory, text):
    """Returns a run whose rate is still constant where the uninterrupted run's falls."""
    out = tmp_path_factory.mktemp("source") / "run"
    assert runs.train(*wsd_words(text, 40), f"out={out}", stop_after=21) == 0
    return out


def branch(source, out, *words, **how) -> int:
    keys = {"steps": FULL, "decay_steps": FULL, "decay": 6} | dict(word.split("=") for word in words)
    given = (f"{name}={value}" for name, value in keys.items())
    return runs.train(f"base={source}/step_{FORK}", f"out={out}", *given, **how)


@pytest.mark.slow
def test_branch_equals_an_uninterrupted_run(tmp_path, source, uninterrupted, capsys):
    before, out = snapshot(source), tmp_path / "branch"
    assert branch(source, out) == 0
    said = capsys.readouterr().out
    assert f"branching from step 12 of {source} with steps 40 -> 24, decay_steps 40 -> 24\n" in said
    assert (
        "learning rate: 1.00e-02 at step 13 (1.00e-02 in the base), 1.75e-03 at the last step; no warm-up is repeated; "
        "the rate falls after step 19\n" in said
    )
    assert contents(out, FULL) == contents(uninterrupted, FULL)
    late = [row for row in runs.rows(uninterrupted) if int(row["step"]) > FORK]
    assert runs.rows(out) == late
    assert snapshot(source) == before
    assert main(["plot", str(source), str(out), f"out={tmp_path / 'runs.png'}"]) == 0
    assert (tmp_path / "runs.png").stat().st_size > 10_000


@pytest.mark.nightly
def test_branch_with_another_rate_differs(tmp_path, source, uninterrupted):
    """The negative twin."""
    assert branch(source, tmp_path / "branch", "decay=9") == 0
    assert contents(tmp_path / "branch", FULL) != contents(uninterrupted, FULL)


@pytest.mark.slow
@pytest.mark.parametrize("saved", [True, False])
def test_stopped_branch_resumes_bitwise(tmp_path, source, uninterrupted, saved):
    out = tmp_path / "branch"
    assert branch(source, out, stop_after=FORK + 3) == 0
    if not saved:  # it begins again, from its base
        (step,) = checkpoint.list_steps(out)
        checkpoint.set_aside(out, step)
    assert runs.train("--resume", out) == 0
    assert contents(out, FULL) == contents(uninterrupted, FULL)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["base={run}/step_5", "out={new}"], "has no checkpoint of step 5; there are {steps}"),
        (["base={run}/step_00000036"], "starts a new run from a checkpoint of another; give its folder: out=NEW"),
        (["tiny", "base={run}/step_36", "out={new}"], "has the keys of its base, got the preset tiny"),
        (["base={run}/step_36", "out={new}", "seed=1"], "seed cannot change on resume"),
        (
            ["base={run}/step_36", "out={new}", "steps=36"],
            "step_00000036 leaves no step to train, got .*; give more st",
        ),
        (
            ["base={run}/step_36", "out={new}", "epochs=0.01"],
            r"_00000036 leaves no .*, got steps=\d+; give more epochs",
        ),
        (["base={run}/step_36", "out={run}"], "already holds a run"),
        (["base={run}/step_36", "out={new}", "data=builtin"], "is not what .* was trained on"),
    ],
)
def test_wrong_branches_are_rejected(tmp_path, finished_run, capsys, words, message):
    before, steps = snapshot(finished_run), checkpoint.list_steps(finished_run)
    assert {36, 40} <= {*steps}
    words = [word.format(run=finished_run, new=tmp_path / "new") for word in words]
    assert main(["train", *words]) == runs.USAGE
    assert re.search(message.format(steps=", ".join(map(str, steps))), capsys.readouterr().err)
    assert snapshot(finished_run) == before
    assert not (tmp_path / "new").exists()
