"""The checkpoint that a run goes back to."""

from types import SimpleNamespace

from shardformer import checkpoint
from shardformer.devices import processes
from shardformer.training import rollback
from tests import shared


def test_newest_of_many_checkpoints_is_restored(monkeypatch):
    """Two processes exchange texts of 2 kB, which 1,000 steps exceed."""
    monkeypatch.setattr(checkpoint, "list_steps", lambda _: list(range(0, 10_000_000, 10_000)))
    monkeypatch.setattr(processes, "text_of_first_process", lambda text: text[:2048])
    config = shared.tiny(save_every=10_000, eval_every=10_000)
    run = SimpleNamespace(out="run", config=config, restore_step=lambda _, step: f"state of {step}")
    assert rollback._restore_earlier(run, None, 5_000_001) == (5_000_000, "state of 5000000")
