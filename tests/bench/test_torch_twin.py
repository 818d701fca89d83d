"""Torch's steps run in a process of their own, and how it failed is said."""

import itertools
import sys
from unittest import mock

import numpy as np
import pytest

from shardformer.analysis.verify import random_batch
from shardformer.bench import contenders, torch_model, torch_twin
from shardformer.errors import RunError
from tests import shared


@pytest.fixture
def settings():
    return shared.tiny(positions="learned", mesh="1x1")


def test_its_losses_are_ours(settings):
    pytest.importorskip("torch")
    batches = contenders.RepeatedBatch(random_batch(settings))
    ours, torchs = contenders.ours(settings, batches, "ours"), torch_twin.torch_step(settings, batches)
    for steps in 1, 3:
        np.testing.assert_allclose(torchs.run(steps), ours.run(steps), rtol=1e-4)
    theirs, mine = torchs.read_parameters(), ours.read_parameters()
    for module, leaves in mine.items():
        for name, leaf in leaves.items():
            np.testing.assert_allclose(theirs[module][name], leaf, atol=1e-4)


def test_it_makes_as_many_steps_as_are_asked_for(monkeypatch):
    losses = iter([5.0, 4.0, 3.0, 2.0])
    monkeypatch.setattr(torch_model, "make_step", lambda *_: (lambda batch: next(losses), {}))
    monkeypatch.setattr(torch_model.signal, "signal", mock.Mock())
    connection = mock.Mock(recv=mock.Mock(side_effect=[[0, 1, 2], [3], EOFError]))
    torch_model.run_steps(connection, *[None] * 6)
    assert [call.args[0][0] for call in connection.send.call_args_list] == [3.0, 2.0]


def test_its_error_is_reported(settings, monkeypatch):
    """It has no parameters, or no torch."""
    monkeypatch.setattr(torch_twin.reference, "initial_parameters", lambda _: {})
    with pytest.raises(RunError, match=r"^torch: \w+Error: "):
        torch_twin.torch_step(settings, contenders.RepeatedBatch(random_batch(settings))).run(1)


@pytest.mark.slow
def test_a_process_that_ends_without_an_answer(settings, monkeypatch):
    monkeypatch.setattr(torch_model, "run_steps", itertools.chain)  # which takes anything and returns at once
    with pytest.raises(RunError, match="the process of torch ended by itself"):
        torch_twin.torch_step(settings, contenders.RepeatedBatch(random_batch(settings))).run(1)


def test_it_multiplies_in_tf32_on_a_gpu_as_jax_does(settings, monkeypatch):
    """A stand-in for torch: the flag is all that can be seen without a GPU."""
    torch = mock.MagicMock()
    monkeypatch.setitem(sys.modules, "torch", torch)
    torch_model.make_step(settings, False, True, {}, set(), [0.1])
    assert torch.backends.cuda.matmul.allow_tf32 is True
