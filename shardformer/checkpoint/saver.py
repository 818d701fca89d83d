"""Saves in the background, one save at a time, by all processes together.

Each process writes its array file into a common temporary folder. The first process waits for all files,
adds the manifest and publishes. The threads communicate only through that folder: a collective could interleave with
the collectives of the training steps.
"""

import contextlib
import dataclasses
import json
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import jax

from shardformer.checkpoint import array_files, documents, folders
from shardformer.checkpoint.manifest import Piece
from shardformer.checkpoint.snapshot import Snapshot, take_snapshot
from shardformer.checkpoint.store import Location, Lock
from shardformer.checkpoint.stores import store_of
from shardformer.devices import processes
from shardformer.errors import RunError
from shardformer.storage import location

PATIENCE_SECONDS = 600  # the first process's limit for the other processes' files


class Saver:
    """The background writer of a run. Every process calls the same methods in the same order: `wait` before `save`."""

    def __init__(self, out: Location | str, lock: Lock | None = None):
        self._out, self._lock = location(out), lock
        try:
            store_of(self._out).make_run_folder(self._out)  # only here: a save must not remake a moved folder
        except OSError as error:
            raise RunError(f"cannot write in {out}: {error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def save(
        self,
        step: int,
        snapshot: Snapshot,
        texts: dict[str, str],
        before: Callable[[], None] = lambda: None,
        then: Callable[[], None] = lambda: None,
    ) -> None:
        """Starts to write; the first process calls `before` just before the checkpoint is visible, and `then` after."""
        if self._writing:
            raise RuntimeError("a save is in flight; wait for it first")
        token = processes.text_of_first_process(secrets.token_hex(4))
        write = _publish if jax.process_index() == 0 else _write_local_part
        job = _Job(self._out, self._lock, step, token, snapshot, texts, before, then)
        self._writing = self._thread.submit(write, job)

    @property
    def done(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Waits for the save in flight; a failure in any process is raised in all of them."""
        if self._writing is None:
            return
        failure, writing, self._writing = "", self._writing, None
        try:
            writing.result()
        except RunError as error:
            failure = str(error)
        if failure := processes.first_message_from_any_process(failure):
            if jax.process_index() == 0:
                store_of(self._out).remove_temporary(self._out)  # others may have written after this process failed
            raise RunError(failure)

    def close(self, wait: bool = True) -> None:
        self._thread.shutdown(wait)


def save(out: Location | str, step: int, state, texts: dict[str, str], lock: Lock | None = None) -> Location:
    """Saves `state` (jax.Arrays) and `texts` (file name -> content) as a checkpoint; every process must call this."""
    return save_snapshot(out, step, take_snapshot(state), texts, lock)


def save_snapshot(
    out: Location | str, step: int, snapshot: Snapshot, texts: dict[str, str], lock: Lock | None = None
) -> Location:
    saver = Saver(out, lock)
    try:
        saver.save(step, snapshot, texts)
        saver.wait()
    finally:
        saver.close()
    return folders.step_folder(out, step)


@dataclasses.dataclass(frozen=True)
class _Job:
    out: Location
    lock: Lock | None
    step: int
    token: str
    snapshot: Snapshot
    texts: dict[str, str]
    before: Callable[[], None]
    then: Callable[[], None]

    @property
    def file(self) -> str:
        return array_files.file_name(jax.process_index(), jax.process_count())


def _publish(job: _Job) -> None:
    with folders.publishing(job.out, job.step, job.token, job.lock) as (folder, publish):
        pieces, nbytes = array_files.write_arrays(folder / job.file, job.snapshot.slices())
        arrays = {job.file: nbytes}
        for process in range(1, jax.process_count()):
            report = _wait_for_report(folder / _report_name(process), process)
            arrays |= report["files"]
            for name, parts in report["pieces"].items():
                pieces.setdefault(name, []).extend(Piece(**part) for part in parts)
        leaves = {
            name: dataclasses.replace(leaf, pieces=tuple(pieces.get(name, ())))
            for name, leaf in job.snapshot.leaves.items()
        }
        manifest = documents.write_documents(folder, leaves, arrays, job.texts, store_of(folder).subfolder(job.token))
        if job.lock:
            job.lock.renew()
        job.before()
        publish(manifest)
    job.then()


def _write_local_part(job: _Job) -> None:
    store = store_of(job.out)
    folder = store.temporary_folder(folders.step_folder(job.out, job.step), job.token)
    try:
        store.make_temporary_folder(folder)
        pieces, nbytes = array_files.write_arrays(folder / job.file, job.snapshot.slices())
        store.sync(folder / job.file)
        listed = {name: [dataclasses.asdict(piece) for piece in parts] for name, parts in pieces.items()}
        report = json.dumps({"files": {job.file: nbytes}, "pieces": listed})
        store.write_at_once(folder / _report_name(jax.process_index()), report.encode())
    except OSError as error:
        with contextlib.suppress(OSError):  # an empty file fits on a full disk
            (folder / _failure_name(jax.process_index())).write_bytes(b"")
        raise RunError(f"cannot write {folder / job.file}: {error}; the older checkpoints are intact") from error


def _report_name(process: int) -> str:
    return f".report-{process:05d}.json"


def _failure_name(process: int) -> str:
    return f".failed-{process:05d}"


def _wait_for_report(path: Location, process: int) -> dict:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.is_file():
        if (path.parent / _failure_name(process)).is_file():
            raise OSError(f"process {process} could not write its part; its log has the reason")
        if time.monotonic() > deadline:
            raise OSError(
                f"process {process} has not written its part within {PATIENCE_SECONDS} s; its log may have the reason"
            )
        time.sleep(store_of(path).poll_seconds)
    report = json.loads(path.read_bytes())
    path.unlink()
    return report
