"""The end of `train`: the text whose programs are compiled before the run ends."""

import types

import pytest

from shardformer.cli.train_command import FinalSample
from shardformer.devices import programs
from tests import shared


@pytest.fixture
def compiled(monkeypatch) -> list[int]:
    """The step after which each compilation of the sample started."""
    steps: list[int] = []
    monkeypatch.setattr(FinalSample, "compile", lambda sample: steps.append(sample.step))
    monkeypatch.setattr(programs, "saves_time", lambda: True)
    return steps


def run_steps(count: int) -> None:
    config = shared.tiny(steps=count)
    sample = FinalSample(config)
    sample._run = types.SimpleNamespace(config=config)
    for sample.step in range(1, count + 1):
        sample.after_step({"step": sample.step})
    sample.close()


def test_sample_is_compiled_once_in_the_last_steps(compiled):
    """A stop before these waits for no compilation."""
    run_steps(200)
    assert len(compiled) == 1
    assert 150 < compiled[0] <= 200


def test_sample_of_a_short_run_is_compiled_once(compiled):
    run_steps(3)
    assert len(compiled) == 1


def test_sample_is_not_compiled_where_no_thread_saves_time(compiled, monkeypatch):
    monkeypatch.setattr(programs, "saves_time", lambda: False)
    run_steps(60)
    assert not compiled
