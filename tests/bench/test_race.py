"""Tests of `bench race`: all train one model on the same batches, and their times and losses are kept apart."""

import json

import jax
import numpy as np
import pytest

from shardformer.bench import command_line, contenders, race
from shardformer.errors import UsageError

SMALL = ("preset=tiny", "data=builtin", "mesh=2x1", "block=sequential", "positions=learned", "tied=true")


@pytest.mark.slow
@pytest.mark.usefixtures("promotion")
def test_racers_reach_the_same_losses(capsys, tmp_path):
    files = f"json={tmp_path}/race.json", f"picture={tmp_path}/race.png"
    command_line.main(["race", *SMALL, "peers=plain", "steps=7", "rounds=2", "eval_batches=2", *files])
    tracks = json.loads((tmp_path / "race.json").read_text())["tracks"]
    assert [track["name"] for track in tracks] == ["plain Haiku + optax", "shardformer 2x1"]
    nats = np.array([track["nats per byte"] for track in tracks])
    np.testing.assert_allclose(nats, nats[-1:].repeat(2, axis=0), rtol=1e-5)
    assert nats[0, 1] < nats[0, 0]  # two different evaluations
    for track in tracks:
        assert 0 < track["cpu seconds"][0] < track["cpu seconds"][1]
    assert (tmp_path / "race.png").stat().st_size
    assert "s / ours" in capsys.readouterr().out


def test_peer_without_parameters_cannot_race():
    with pytest.raises(UsageError, match=r"some of plain,partitioned,torch,torch_compile, got 'xmap'"):
        command_line.main(["race", *SMALL, "peers=xmap"])


def test_each_step_has_its_batch():
    batches = race.TurnBatches(iter([{"tokens": number} for number in range(5)]))
    batches.read(2)
    assert [batches[step]["tokens"] for step in (0, 1)] == [0, 1]
    batches.read(3)
    assert [batches[step]["tokens"] for step in (2, 3, 4)] == [2, 3, 4]
    with pytest.raises(KeyError):
        batches[1]


def test_layers_are_stacked_by_number():
    """Sorted as text, layer 10 would come before layer 2."""
    params = {
        "transformer/layers/norm": {"scale": np.arange(24.0).reshape(12, 2)},
        "transformer/head": {"w": np.ones(3)},
    }
    separate = contenders.unstack(params)
    assert len(separate) == 13
    restored = contenders.stack(dict(sorted(separate.items())))
    jax.tree.map(np.testing.assert_array_equal, restored, params)


def test_diverged_loss_is_printed():
    contender = contenders.Contender("ours", 1, lambda state, step: (state, 0.0), None)
    track = race.Track(contender, cpu_seconds=[1.0], seconds=[2.0], nats=[float("nan")])
    assert "nan" in race.format_tracks([track])
