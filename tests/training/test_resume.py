"""A run that is stopped, killed or finished, and then resumed."""

import jax
import pytest

from shardformer import checkpoint
from tests import runs
from tests.surroundings import simulate_devices
from tests.training.uneven_run import STEPS, contents, losses, uneven_words


def test_resume_after_a_stop_is_bitwise(tmp_path, text, finished_run, capsys):
    """After the first step, an evaluation, a save, a step that is neither, and the last step but one."""
    out = tmp_path / "run"
    words = (*uneven_words(text), f"out={out}")
    for stop in (1, 7, 9, 13, 39):
        assert runs.train(*words, stop_after=stop) == 0
        said = capsys.readouterr().out
        assert f"SIGTERM: stopped after step {stop} of {STEPS}" in said
        assert f"resume with: python -m shardformer train --resume {out}" in said
        assert checkpoint.list_steps(out)[-1] == stop
        words = ("--resume", out)
    assert runs.train(*words) == 0
    assert contents(out) == contents(finished_run)
    assert runs.rows(out) == runs.rows(finished_run)
    assert (out / "final.json").read_text() == (finished_run / "final.json").read_text()


@pytest.mark.slow
def test_resume_repeats_the_steps_after_the_last_checkpoint(tmp_path, text, finished_run):
    """A crash leaves rows that are ahead of the newest checkpoint."""
    out = tmp_path / "run"

    def unplug():
        raise RuntimeError("the plug is pulled")

    with pytest.raises(RuntimeError, match="plug"):
        runs.train(*uneven_words(text), f"out={out}", stop_after=35, act=unplug)
    assert checkpoint.list_steps(out)[-1] < int(runs.rows(out)[-1]["step"])
    assert runs.train("--resume", out) == 0
    assert contents(out) == contents(finished_run)
    assert runs.rows(out) == runs.rows(finished_run)


def test_resume_without_a_checkpoint_starts_again(tmp_path, text, finished_run):
    out = tmp_path / "run"
    assert runs.train(*uneven_words(text), f"out={out}", stop_after=1) == 0
    for step in checkpoint.list_steps(out):
        for path in checkpoint.step_folder(out, step).iterdir():
            path.unlink()
        checkpoint.step_folder(out, step).rmdir()
    assert runs.train("--resume", out) == 0
    assert contents(out) == contents(finished_run)
    assert runs.rows(out) == runs.rows(finished_run)


@pytest.mark.slow
def test_resume_on_another_mesh(tmp_path, text, finished_run):
    out, mesh = tmp_path / "run", "1x8"
    assert runs.train(*uneven_words(text), f"out={out}", stop_after=20) == 0
    assert runs.train("--resume", out, f"mesh={mesh}") == 0
    assert checkpoint.read_config(out).parallel.mesh == mesh
    got, expected = losses(out), losses(finished_run)
    assert got.keys() == expected.keys()
    assert {step for step in got if got[step] == expected[step]} >= {step for step in got if step <= 20}
    assert got[STEPS] == pytest.approx(expected[STEPS], rel=1e-4)


@pytest.mark.nightly
def test_resume_on_half_of_the_devices(tmp_path, text, finished_run, monkeypatch, capsys):
    out = tmp_path / "run"
    assert runs.train(*uneven_words(text), f"out={out}", stop_after=20) == 0
    simulate_devices(monkeypatch, jax.devices()[:4])
    assert runs.train("--resume", out, "accum=auto") == 0
    said = capsys.readouterr().out
    assert "8 devices before, 4 now: mesh=4x2 becomes mesh=2x2, batch=8 stays\n" in said
    assert "auto took accum=2: 2 rows at a time on each device\n" in said
    assert "resuming from step 20 with mesh 4x2 -> 2x2, accum 1 -> 2\n" in said
    assert (checkpoint.read_config(out).parallel.mesh, checkpoint.read_config(out).training.accum) == ("2x2", 2)
    assert losses(out)[STEPS] == pytest.approx(losses(finished_run)[STEPS], rel=1e-4)


@pytest.mark.slow
def test_resume_with_more_steps(tmp_path, text, finished_run):
    out = tmp_path / "run"
    assert runs.train(*uneven_words(text, steps=20), f"decay_steps={STEPS}", f"out={out}") == 0
    assert runs.train("--resume", out, f"steps={STEPS}") == 0
    assert checkpoint.read_config(out).training.steps == STEPS
    assert contents(out) == contents(finished_run)


def test_resume_of_a_finished_run_changes_nothing(finished_run, capsys):
    before = contents(finished_run), runs.rows(finished_run)
    assert runs.train("--resume", finished_run) == 0
    assert f"the run is at step {STEPS} of {STEPS}" in capsys.readouterr().out
    assert (contents(finished_run), runs.rows(finished_run)) == before


def test_resume_rejects_fewer_steps_than_are_done(finished_run, capsys):
    assert runs.train("--resume", finished_run, "steps=7") == runs.USAGE
    assert f"is at step {STEPS} already, got steps=7; give more" in capsys.readouterr().err
