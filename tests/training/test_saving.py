"""When a run saves, what that costs it, and what a save that fails does."""

import csv
import errno
import os
import shutil
import threading
import time

import jax
import jax.numpy as jnp
import pytest

from shardformer import checkpoint
from shardformer.checkpoint import folders
from shardformer.devices import processes
from shardformer.errors import RunError
from shardformer.files import GrowingFile
from shardformer.logs import goodput
from shardformer.training import saving
from shardformer.training.checkpoint_progress import Best, RoundedBest, read_progress
from shardformer.training.run_folder import Run
from shardformer.training.saving import RunCheckpoints
from tests import runs, shared
from tests.surroundings import answer_for_processes, before_call, before_sync, let_fail, simulate_processes
from tests.training.test_run_folder import CORPUS
from tests.training.uneven_run import plain_words
from tests.waiting import PATIENCE


def disk_full(*_, **__):
    raise OSError(errno.ENOSPC, "No space left on device")


def state(step: int):
    return shared.trainer().init()._replace(step=jnp.int32(step))


def make_checkpoints(tmp_path, lock=None, clock=time.monotonic, **settings) -> RunCheckpoints:
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run"), **settings), CORPUS)
    return RunCheckpoints(run, Best(), lock, clock)


def save(each: RunCheckpoints, step: int) -> None:
    each.write(each.take_snapshot(state(step)), step)


def test_best_starts_anew_with_the_first_rounded_loss(tmp_path):
    each = make_checkpoints(tmp_path, quantize_aware="nf4", steps=8)  # rounds after step 6
    assert each.update_best(4, 1.0)
    assert not each.update_best(5, 1.5)
    assert each.update_best(6, 2.0)
    assert not each.update_best(7, 2.5)
    assert (type(each.best), each.best) == (RoundedBest, (6, 2.0))


def test_float_loss_after_a_resume_replaces_no_rounded_one(tmp_path):
    """More steps move the rounding behind the best checkpoint."""
    each = make_checkpoints(tmp_path, quantize_aware="nf4", steps=16)
    each.best = RoundedBest(6, 2.0)
    assert not each.update_best(10, 1.0)
    assert each.update_best(12, 1.5)


def test_loss_that_is_nan_starts_no_best_anew(tmp_path):
    each = make_checkpoints(tmp_path, quantize_aware="nf4", steps=8)
    assert not each.update_best(6, float("nan"))


def test_rounding_of_the_best_is_stored(tmp_path):
    run = Run.create(shared.tiny(vocab=0, out=str(tmp_path / "run")), CORPUS)
    best = RoundedBest(6, 2.0)
    folder = checkpoint.save(run.out, 8, {"step": jnp.int32(8)}, run.documents(8, best))
    assert type(read_progress(folder).best) is RoundedBest


def test_by_the_number_of_steps(tmp_path):
    due = make_checkpoints(tmp_path, save_every=6, keep_every=10).is_due
    assert [step for step in range(1, 31) if due(step)] == [6, 10, 12, 18, 20, 24, 30]
    assert not any(map(make_checkpoints(tmp_path, save_every=0).is_due, range(1, 31)))


def test_by_the_clock(tmp_path):
    now = [1000.0]
    with make_checkpoints(tmp_path, clock=lambda: now[0], save_every=0, save_minutes=2.0) as each:
        taken = []
        for step in range(1, 11):
            now[0] += 50
            if each.is_due(step):
                taken.append(step)
                save(each, step)
        assert taken == [3, 6, 9]


def test_several_processes_ask_the_clock_together(tmp_path, monkeypatch):
    """Their clocks differ: one that is late makes all of them save, at a step that all of them log."""
    asked = []
    simulate_processes(monkeypatch, 2)
    answer_for_processes(monkeypatch, lambda text: asked.append(text) or [text, "late"])
    each = make_checkpoints(tmp_path, save_every=0, save_minutes=2.0, log_every=4)
    assert [step for step in range(1, 13) if each.is_due(step)] == [4, 8, 12]
    assert asked == [""] * 3


def test_the_kept_ones(tmp_path):
    with make_checkpoints(tmp_path, keep=2, keep_every=20) as each:
        for step in range(5, 51, 5):
            if step == 15:
                assert each.update_best(step, 1.5)
            assert not each.update_best(step, 2.0) or step < 15
            save(each, step)
    assert checkpoint.list_steps(tmp_path / "run") == [15, 20, 40, 45, 50]


def test_training_waits_for_the_copy_alone(tmp_path, monkeypatch):
    """The writer is blocked; the loop is not, until the next save."""
    go = threading.Event()
    before_call(monkeypatch, checkpoint.saver.documents, "write_documents", lambda *_: go.wait(PATIENCE))
    with make_checkpoints(tmp_path) as each:
        save(each, 5)
        assert checkpoint.list_steps(tmp_path / "run") == []
        goodput.CLOCK.take("save")
        assert goodput.CLOCK.take("save") == 0
        # The writer goes on a while after the loop waits for it.
        before_call(monkeypatch, each._saver, "wait", lambda: threading.Timer(0.4, go.set).start())
        start = time.monotonic()
        save(each, 10)
        waited = time.monotonic() - start
        # One save is in flight: the first is done before the second starts.
        assert checkpoint.list_steps(tmp_path / "run")[0] == 5
        assert 0.3 <= goodput.CLOCK.take("save") <= waited
    assert checkpoint.list_steps(tmp_path / "run") == [5, 10]


@pytest.mark.slow
def test_what_is_saved_is_the_state_of_its_step(tmp_path, monkeypatch):
    """The next step writes into the buffers that the writer has not read yet."""
    go = threading.Event()
    before_call(monkeypatch, checkpoint.saver.array_files, "write_arrays", lambda *_: go.wait(PATIENCE))
    trainer = shared.trainer()
    with make_checkpoints(tmp_path) as each:
        trained, _ = trainer.step(trainer.init(), shared.batch(), 0)
        expected = shared.on_host(jax.tree.map(jnp.copy, trained))
        each.write(each.take_snapshot(trained), 1)
        for step in range(1, 4):
            trained, _ = trainer.step(trained, shared.batch(step), step)
        jax.block_until_ready(trained)
        go.set()
    restored = shared.on_host(checkpoint.restore(checkpoint.step_folder(tmp_path / "run", 1), trainer.abstract))
    assert jax.tree.all(jax.tree.map(lambda a, b: a.tobytes() == b.tobytes(), restored, expected))


def until_done(each: RunCheckpoints) -> None:
    while not each._saver.done:
        time.sleep(0.01)


def test_a_failing_save_stops_the_run(tmp_path, monkeypatch):
    def train():
        with make_checkpoints(tmp_path) as each:
            save(each, 5)
            each.wait()
            before_sync(monkeypatch, disk_full)
            save(each, 10)
            until_done(each)
            each.poll()  # at the very next step
            pytest.fail("the loop went on")

    with pytest.raises(RunError, match=r"cannot write the checkpoint .*step_00000010: .*No space left"):
        train()
    assert checkpoint.list_steps(tmp_path / "run") == [5]


def test_a_failing_save_is_reported_and_training_goes_on(tmp_path, monkeypatch, said):
    with make_checkpoints(tmp_path, on_save_error="continue") as each:
        assert each.update_best(5, 2.0)
        save(each, 5)
        each.wait()
        with monkeypatch.context() as patch:
            before_sync(patch, disk_full)
            assert each.update_best(10, 1.0)
            save(each, 10)
            until_done(each)
        each.poll()
        (line,) = said
        assert "No space left on device" in line
        assert "training continues (on_save_error=continue)" in line
        assert each.best == Best(5, 2.0)  # the better one is not there
        save(each, 15)
    assert checkpoint.list_steps(tmp_path / "run") == [5, 15]
    assert len(said) == 1


def test_the_last_save_must_not_fail(tmp_path, monkeypatch):
    def train():
        with make_checkpoints(tmp_path, on_save_error="continue") as each:
            before_sync(monkeypatch, disk_full)
            save(each, 10)

    with pytest.raises(RunError, match="No space left"):
        train()


@pytest.mark.slow
def test_a_full_disk_in_a_run(tmp_path, text, monkeypatch, capsys):
    """From the command: a run that may continue does, and saves when space is available."""
    broken = []

    def full_for_a_while(_):
        if len(broken) < 2 and threading.current_thread().name.startswith("checkpoint"):
            broken.append(disk_full) or disk_full()

    words = (*plain_words(text), "steps=6", "eval_every=100", "save_every=1", "on_save_error=continue")
    before_sync(monkeypatch, full_for_a_while)
    assert runs.train(*words, f"out={tmp_path}/run") == 0
    assert capsys.readouterr().out.count("training continues") == 2
    assert checkpoint.list_steps(tmp_path / "run")[-1] == 6
    broken.clear()
    assert runs.train(*words[:-1], f"out={tmp_path}/stopped") == 1
    assert (
        "No space left on device; the older ones are intact; free some space, and resume the run"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "stopped" / ".lock").exists()


def full_from(step: int, monkeypatch) -> list[int]:
    """The disk has no room for rows from a step on, while the list that it returns has fewer than three of them."""
    failed = []

    def full(self):
        row = self._unwritten.decode().splitlines()[-1:]
        if row and int(row[0].partition(",")[0]) >= step and len(failed) < 3:
            failed.append(step)
            raise RunError(f"cannot write {self._path}: [Errno 28] No space left on device")

    before_call(monkeypatch, GrowingFile, "flush", full)
    return failed


def test_rows_without_room_do_not_end_a_run_that_goes_on(tmp_path, text, monkeypatch, capsys):
    words = (*plain_words(text), "steps=9", "eval_every=100", "save_every=100", "log_every=1")
    failed = full_from(3, monkeypatch)
    assert runs.train(*words, "on_save_error=continue", f"out={tmp_path}/run") == 0
    said = capsys.readouterr().out
    assert len(failed) == 3
    line = f"cannot write {tmp_path}/run/metrics.csv: [Errno 28] No space left on device; training continues"
    assert said.count(line) == said.count("cannot write") == 1
    assert [int(row["step"]) for row in runs.rows(tmp_path / "run")] == [*range(1, 10)]
    assert checkpoint.list_steps(tmp_path / "run") == [9]


def test_rows_on_a_full_disk_end_a_run_with_its_state_saved(tmp_path, text, monkeypatch, capsys):
    words = (*plain_words(text), "steps=9", "eval_every=100", "save_every=100", "log_every=1")
    full_from(3, monkeypatch)
    assert runs.train(*words, f"out={tmp_path}/run") == 1
    (step,) = checkpoint.list_steps(tmp_path / "run")
    assert 3 < step < 9
    error = capsys.readouterr().err
    assert f"cannot write {tmp_path}/run/metrics.csv: [Errno 28] No space left" in error
    assert f"the run is saved as step {step}" in error
    monkeypatch.undo()
    assert runs.train("--resume", f"{tmp_path}/run") == 0
    assert [int(row["step"]) for row in runs.rows(tmp_path / "run")] == [*range(1, 10)]


def test_processes_learn_of_a_failed_write_at_the_next_save(tmp_path, monkeypatch):
    told = ["process 0: cannot write metrics.csv", ""]

    def train():
        with make_checkpoints(tmp_path, save_every=5) as each:
            monkeypatch.setattr(processes, "first_message_from_any_process", lambda text: told.pop(0))
            each.write(each.take_snapshot(state(5)), 5)

    with pytest.raises(RunError, match=r"process 0: cannot write metrics\.csv; the run is saved as step 5"):
        train()


def test_the_time_lost_is_in_the_metrics(tmp_path, text):
    words = (*plain_words(text), "steps=7", "eval_every=100", "save_every=3", "log_every=1")
    assert runs.train(*words, f"out={tmp_path}/run") == 0
    with open(tmp_path / "run" / "metrics.csv", newline="") as file:
        lost = {int(row["step"]): row["save_s"] for row in csv.DictReader(file)}
    assert [step for step, seconds in lost.items() if seconds] == [3, 6, 7]
    assert all(0 < float(seconds) < 60 for seconds in lost.values() if seconds)


def moved(out):
    return out.rename(out.with_name("moved"))


def deleted(out):
    shutil.rmtree(out)
    return out


def replaced(out):
    """Replaces the folder with another run's, which has a different lock."""
    shutil.rmtree(out)
    out.mkdir()
    (out / ".lock").touch()
    return out.with_name("run-saved")


@pytest.mark.parametrize(
    ("lose", "on_save_error"), [(moved, "stop"), (moved, "continue"), (deleted, "stop"), (replaced, "stop")]
)
def test_lost_run_folder_ends_the_run_with_its_state_saved(tmp_path, text, monkeypatch, capsys, lose, on_save_error):
    out, place = tmp_path / "run", []
    words = (*plain_words(text), "steps=14", "eval_every=100", "save_every=100", "log_every=1",
             f"on_save_error={on_save_error}")  # fmt: skip
    assert runs.train(*words, f"out={out}", stop_after=5, act=lambda: place.append(lose(out))) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    if lose is deleted and out.exists() and not checkpoint.list_steps(out):
        place = [out.with_name("run-saved")]  # another writer has recreated the folder
    (step,) = checkpoint.list_steps(place[0])
    assert 5 <= step <= 12
    assert f"{out} was {'moved to' if lose is moved else 'deleted, or moved'}" in error
    assert f"the state of step {step} is saved in {place[0]}: go on with train --resume {place[0]}" in error
    assert lose is deleted or not (out / "config.json").exists()
    assert runs.train("--resume", place[0]) == 0
    assert checkpoint.list_steps(place[0])[-1] == 14
    assert not (place[0] / ".lock").exists()


def test_a_lost_folder_is_noticed_by_the_save_itself(tmp_path):
    def train():
        with checkpoint.lock_folder(tmp_path / "run") as lock, make_checkpoints(tmp_path, lock=lock) as each:
            save(each, 1)
            each.wait()
            moved(tmp_path / "run")
            save(each, 2)

    with pytest.raises(RunError, match=r"was moved to .*/moved while .* the state of step 2 is saved in .*/moved: go"):
        train()
    assert checkpoint.list_steps(tmp_path / "moved") == [1, 2]
    assert not (tmp_path / "run").exists()


def test_folder_lost_during_the_last_save_costs_nothing(tmp_path, monkeypatch):
    def train():
        with (
            checkpoint.lock_folder(tmp_path / "run") as lock,
            make_checkpoints(tmp_path, lock=lock) as each,
            monkeypatch.context() as patch,
        ):
            before_call(patch, os, "rename", lambda *_: os.replace(tmp_path / "run", tmp_path / "moved") or disk_full())
            save(each, 1)
            until_done(each)

    with pytest.raises(RunError, match=r"the state of step 1 is saved in .*/moved: go"):
        train()
    assert checkpoint.list_steps(tmp_path / "moved") == [1]


def test_silent_store_does_not_end_training(tmp_path, monkeypatch, said):
    unreachable = OSError(errno.EIO, "unreachable")
    with make_checkpoints(tmp_path, on_save_error="continue") as each:
        assert each.update_best(5, 2.0)
        save(each, 5)
        each.wait()
        with monkeypatch.context() as patch:
            before_sync(patch, disk_full)
            let_fail(patch, saving.checkpoint, "list_steps", unreachable)
            save(each, 10)
            each.wait()
        assert each.best == Best(5, 2.0)
        assert len(said) == 1
        with monkeypatch.context() as patch:  # published, but what to delete cannot be listed
            let_fail(patch, folders, "list_steps", unreachable)
            save(each, 15)
            each.wait()
        assert len(said) == 2
        save(each, 20)
    assert 20 in checkpoint.list_steps(tmp_path / "run")


def test_a_long_name_of_a_lost_folder(tmp_path, monkeypatch):
    def cut(text):
        return [text.encode()[:2048].decode(errors="ignore")]  # as in a run of two or more processes

    answer_for_processes(monkeypatch, cut)
    place = tmp_path / ("\u904b" * 80)

    class Lost:
        def check_still_locked(self):
            raise checkpoint.FolderLost("\u904b" * 500, place)

    assert make_checkpoints(tmp_path, lock=Lost())._find_lost_folder()[1] == str(place)
