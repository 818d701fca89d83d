"""The end of `train`: the text whose programs are compiled before the run ends."""

import types

import pytest

from shardformer.cli import train_command
from shardformer.cli.train_command import FinalSample
from shardformer.devices import programs
from tests import shared


@pytest.fixture
def compiled(monkeypatch) -> list[int]:
    """The step after which each compilation of the sample was started."""
    steps: list[int] = []

    class Recorder:
        def __init__(self, work):
            steps.append(work.__self__.step)

        def wait(self):
            pass

    monkeypatch.setattr(train_command, "EarlyWork", Recorder)
    monkeypatch.setattr(programs, "saves_time", lambda: True)
    return steps


def make_sample(steps: int) -> FinalSample:
    config = shared.tiny(steps=steps)
    sample = FinalSample(config)
    sample._run = types.SimpleNamespace(config=config)
    return sample


def run_steps(count: int) -> None:
    sample = make_sample(count)
    for sample.step in range(1, count + 1):
        sample.after_step({"step": sample.step})
    sample.close()


def test_sample_is_compiled_once_in_the_last_steps(compiled):
    """A stop before these waits for no compilation."""
    run_steps(200)
    assert compiled == [151]


def test_sample_of_a_short_run_is_compiled_once(compiled):
    run_steps(3)
    assert compiled == [1]


@pytest.mark.parametrize(("step", "expected"), [(199, []), (200, [200])])
def test_sample_of_a_run_that_has_ended_is_compiled_at_once(compiled, monkeypatch, step, expected):
    monkeypatch.setattr(train_command, "make_sampling_model", lambda *_: None)
    monkeypatch.setattr(train_command, "Generator", lambda _: None)
    sample = make_sample(200)
    sample.step = step
    sample.prepare(sample._run, None, types.SimpleNamespace(step=step))
    assert compiled == expected


def test_sample_is_not_compiled_where_no_thread_saves_time(compiled, monkeypatch):
    monkeypatch.setattr(programs, "saves_time", lambda: False)
    run_steps(60)
    assert not compiled
