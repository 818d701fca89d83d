"""The checkpoint that a run goes back to."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from shardformer import checkpoint
from shardformer.devices import processes
from shardformer.training import rollback
from shardformer.training.step import TrainState
from tests import shared


def test_newest_of_many_checkpoints_is_restored(monkeypatch):
    """Two processes exchange texts of 2 kB, which 1,000 steps exceed."""
    monkeypatch.setattr(checkpoint, "list_steps", lambda _: list(range(0, 10_000_000, 10_000)))
    monkeypatch.setattr(processes, "text_of_first_process", lambda text: text[:2048])
    config = shared.tiny(save_every=10_000, eval_every=10_000)
    run = SimpleNamespace(out="run", config=config, restore_step=lambda _, step: f"state of {step}")
    assert rollback._restore_earlier(run, None, 5_000_001) == (5_000_000, "state of 5000000")


@pytest.mark.parametrize(("went_back_at", "before"), [(35, 20), (30, 35)])
def test_run_that_is_stuck_goes_back_further(monkeypatch, went_back_at, before):
    """No step was applied since the run went back to step 20, or some were, whose checkpoints are tried first."""
    names = ("applied", "in_row", "skipped", "rollbacks", "went_back_at", "went_back_to")
    guard = {name: jnp.int32(0) for name in names}
    asked = []

    def restore_earlier(run, trainer, before):
        asked.append(before)
        return 10, TrainState(jnp.int32(10), {}, {}, guard=guard)

    monkeypatch.setattr(rollback, "_restore_earlier", restore_earlier)
    record = {
        "applied": 3,
        "in_row": 5,
        "skipped": 12,
        "rollbacks": 1,
        "went_back_at": went_back_at,
        "went_back_to": 20,
    }
    state = rollback._restore_as(SimpleNamespace(), None, 40, record)
    assert asked == [before]
    assert int(state.step) == 40
    new = {name: int(value) for name, value in state.guard.items()}
    assert new == {"applied": 0, "in_row": 0, "skipped": 12, "rollbacks": 2, "went_back_at": 40, "went_back_to": 10}


def test_left_out_step_of_a_task_has_no_number_it_never_had(monkeypatch):
    """A task without an accuracy has None there, as a non-finite number has."""
    verdict = rollback.Verdict(*[0.0] * len(rollback.Verdict._fields))._replace(in_row=1.0)
    monkeypatch.setattr(rollback.Verdict, "read", lambda _: verdict)
    feature = rollback.SkippedSteps(None)
    feature._file = None
    row = {"step": 3, "loss": 9.0, "accuracy": None, "z_loss": float("inf"), "grad_norm": 1.0}
    read = feature.after_step(row, None, None, None)
    assert read == row | {"z_loss": None}
