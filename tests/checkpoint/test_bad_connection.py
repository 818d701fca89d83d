"""Saves, leases and commands while three of ten requests or answers are lost: bitwise what a sound network gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from shardformer import checkpoint
from shardformer.__main__ import main
from shardformer.checkpoint import bucket_store, lease
from shardformer.errors import RunError
from shardformer.storage import bucket, location
from tests import runs
from tests.checkpoint import places
from tests.checkpoint.cases import here
from tests.checkpoint.test_bucket_run import WORDS, arrays
from tests.storage.faults import RESET, BadConnection
from tests.surroundings import before_call, change_bucket_store, change_patience

RATE = 0.3
KINDS = ("put", "create", "swap", "get", "get_range", "list", "delete")


@pytest.fixture
def out(tmp_path, monkeypatch):
    monkeypatch.setitem(bucket.SCHEMES, "memory", "MemoryStore")
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    change_patience(monkeypatch, pause=0.0)
    change_bucket_store(monkeypatch, part=1000)
    return places.new_place("memory", tmp_path)


def state(step: int) -> dict:
    return {"x": jnp.arange(1000.0) + step, "y": jnp.ones(7)}


def assert_restores(folder, step: int) -> None:
    like = {name: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=here()) for name, leaf in state(step).items()}
    for name, leaf in checkpoint.restore(folder, like).items():
        np.testing.assert_array_equal(leaf, state(step)[name])


def test_saves_and_leases_survive_lost_requests(out, monkeypatch):
    connection = BadConnection(RATE).install(monkeypatch)
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=0.05)) as held:
        for step in range(1, 25):
            folder = checkpoint.save(out, step, state(step), {"progress.json": "{}"}, held)
            assert_restores(folder, step)
            checkpoint.prune(out, keep=3, also=set())
    aside = checkpoint.set_aside(out, 24)
    assert aside.exists()
    assert checkpoint.list_steps(out) == [22, 23]
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=0.05)):
        pass
    for kind in KINDS:
        assert connection.faults[f"{kind} reset"], connection.faults
        assert connection.faults[f"{kind} answer lost"], connection.faults


def test_manifest_without_answer_is_published_once(out, monkeypatch):
    """The checkpoint was visible and its save failed."""
    lost = []

    def lose_first_answer(path, call):
        if path.name == "manifest.json" and not lost:
            call()
            lost.append(path)

    before_call(monkeypatch, bucket, "send", lose_first_answer)
    with checkpoint.lock_folder(out, lease.TIMES._replace(renew=0.05)) as held:
        checkpoint.save(out, 40, state(40), {}, held)
    assert lost
    assert checkpoint.list_steps(out) == [40]


def hold_manifest_back(patch) -> list:
    """Lets the puts of manifests fail, as without an answer; returns what they would have put."""
    held = []

    def fail(path, content):
        if path.name == "manifest.json":
            held.append((path, content))
            raise bucket.UnansweredError(5, "timed out", str(path))

    before_call(patch, bucket, "create", fail)
    return held


@pytest.mark.parametrize("again", [2, 3])
def test_manifest_that_arrives_after_its_save_failed(out, monkeypatch, again):
    """A proxy may deliver it minutes later: its files are gone by then."""
    checkpoint.save(out, 1, state(1), {})
    with monkeypatch.context() as patch:
        held = hold_manifest_back(patch)
        with pytest.raises(RunError, match=r"step_00000002: .*timed out"):
            checkpoint.save(out, 2, state(2), {})
    bucket.write(*held[0])
    assert checkpoint.list_steps(out) == [1]
    assert_restores(checkpoint.save(out, again, state(again), {}), again)
    assert checkpoint.list_steps(out) == [1, again]
    manifests = {name for name in bucket.list_objects(out) if name.endswith("manifest.json")}
    assert manifests == {f"step_0000000{step}/manifest.json" for step in (1, again)}


def test_manifest_that_arrives_before_its_files_are_removed(out, monkeypatch):
    """The negative twin: its save failed, and the checkpoint is sound and stays."""
    with monkeypatch.context() as patch:
        held = hold_manifest_back(patch)

        def arrive(*_, **__):
            if held:
                bucket.write(*held[0])

        before_call(patch, bucket_store.BucketStore, "remove_temporary", arrive)
        with pytest.raises(RunError, match=r"step_00000002: .*timed out"):
            checkpoint.save(out, 2, state(2), {})
    assert checkpoint.list_steps(out) == [2]
    assert_restores(checkpoint.step_folder(out, 2), 2)


def test_save_fails_if_the_network_stays_down(out, monkeypatch):
    """The negative twin: nothing is visible, and the older checkpoint can be restored."""
    checkpoint.save(out, 1, state(1), {})
    change_patience(monkeypatch, most=0, first=0)
    with monkeypatch.context() as patch:
        BadConnection(1.0).install(patch)
        with pytest.raises(RunError, match=r"step_00000002: .*check the network.*the older ones are intact"):
            checkpoint.save(out, 2, state(2), {})
    assert checkpoint.list_steps(out) == [1]
    assert_restores(checkpoint.step_folder(out, 1), 1)


@pytest.mark.slow
def test_commands_on_a_bad_connection_are_bitwise(out, tmp_path, text, capsys, monkeypatch):
    sound = tmp_path / "sound"
    assert runs.train(*WORDS, f"data={text}", f"out={sound}") == 0
    assert main(["eval", str(sound), "split=validation", "mesh=4x2"]) == 0
    expected = capsys.readouterr().out.splitlines()[-1]
    connection = BadConnection(RATE).install(monkeypatch)
    assert runs.train(*WORDS, f"data={text}", f"out={out}", stop_after=3) == 0
    assert runs.train("--resume", out, f"data={text}") == 0
    found, wanted = (arrays(checkpoint.step_folder(place, 6)) for place in (location(str(out)), sound))
    assert found.keys() == wanted.keys()
    for name in wanted:
        np.testing.assert_array_equal(found[name], wanted[name], err_msg=name)
    capsys.readouterr()
    assert main(["eval", str(out), "split=validation", "mesh=4x2"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == expected
    for words in (["inspect", out], ["show", out], ["diff", out, sound], ["plot", out, f"out={tmp_path}/a.png"]):
        assert main([str(word) for word in words]) == 0
    assert main(["convert", str(out), str(tmp_path / "gptj"), "shards=2"]) == 0
    assert main(["convert", str(tmp_path / "gptj"), f"{out}/back"]) == 0
    assert sum(connection.faults.values()) > 50
    assert RESET not in "".join(capsys.readouterr())
