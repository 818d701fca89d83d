"""Saves in the background, one at a time, by all processes together.

Each process writes its own array file into one temporary folder; the first waits for the others' files, adds the
manifest and publishes. The threads communicate only through that folder: a collective would disturb the steps' own.
"""

import contextlib
import dataclasses
import json
import os
import secrets
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import jax

from shardformer import files, processes
from shardformer.checkpoint import array_files, documents, folders
from shardformer.checkpoint.manifest import Piece
from shardformer.checkpoint.snapshot import Snapshot, take_snapshot
from shardformer.errors import RunError

PATIENCE_SECONDS = 600  # for which the first process waits for the others' files
_POLL_SECONDS = 0.02


class Saver:
    """Every process calls the same methods in the same order; `wait` before `save`."""

    def __init__(self, out: Path):
        self._out = Path(out)
        try:
            files.make_folder(self._out)  # once: a save does not make a folder anew that was moved away
        except OSError as error:
            raise RunError(f"cannot write in {out}: {error}") from error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def save(
        self, step: int, snapshot: Snapshot, texts: dict[str, str], then: Callable[[], None] = lambda: None
    ) -> None:
        """Starts to write; `then` runs in the first process once the checkpoint is visible."""
        if self._writing:
            raise RuntimeError("a save is in flight; wait for it first")
        token = processes.text_of_first_process(secrets.token_hex(4))
        write = _publish if jax.process_index() == 0 else _contribute
        job = _Job(self._out, step, token, snapshot, texts, then, jax.process_index(), jax.process_count())
        self._writing = self._thread.submit(write, job)

    @property
    def done(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Waits for the save in flight; what failed in any process is raised in all of them."""
        if self._writing is None:
            return
        failure, self._writing, failed = "", None, self._writing
        try:
            failed.result()
        except RunError as error:
            failure = str(error)
        if failure := processes.first_message_from_any_process(failure):
            if jax.process_index() == 0:
                folders.remove_temporary(self._out)  # also what others wrote after this process had failed
            raise RunError(failure)

    def close(self, wait: bool = True) -> None:
        self._thread.shutdown(wait)


def save(out: Path, step: int, state, texts: dict[str, str]) -> Path:
    """Saves `state` (jax.Arrays) and `texts` (file name -> content) as one checkpoint; every process must call it."""
    saver = Saver(out)
    try:
        saver.save(step, take_snapshot(state), texts)
        saver.wait()
    finally:
        saver.close()
    return folders.step_folder(out, step)


@dataclasses.dataclass(frozen=True)
class _Job:
    out: Path
    step: int
    token: str
    snapshot: Snapshot
    texts: dict[str, str]
    then: Callable[[], None]
    process: int
    processes: int

    @property
    def file(self) -> str:
        return array_files.file_name(self.process, self.processes)


def _publish(job: _Job) -> None:
    with folders.publishing(job.out, job.step, job.token) as folder:
        pieces, nbytes = array_files.write_arrays(folder / job.file, job.snapshot.slices())
        arrays = {job.file: nbytes}
        for process in range(1, job.processes):
            report = _wait_for_report(folder / _report_name(process), process)
            arrays |= report["files"]
            for name, parts in report["pieces"].items():
                pieces.setdefault(name, []).extend(Piece(**part) for part in parts)
        leaves = {
            name: dataclasses.replace(leaf, pieces=tuple(pieces.get(name, ())))
            for name, leaf in job.snapshot.leaves.items()
        }
        documents.write_documents(folder, leaves, arrays, job.texts)
    job.then()


def _contribute(job: _Job) -> None:
    folder = folders.temporary_folder(job.out, job.step, job.token)
    try:
        folder.mkdir(exist_ok=True)
        report = folder / _report_name(job.process)
        pieces, nbytes = array_files.write_arrays(folder / job.file, job.snapshot.slices())
        files.sync(folder / job.file)
        pieces = {name: [dataclasses.asdict(piece) for piece in parts] for name, parts in pieces.items()}
        writing = report.with_suffix(".tmp")
        writing.write_text(json.dumps({"files": {job.file: nbytes}, "pieces": pieces}))
        os.rename(writing, report)  # complete as soon as it is visible
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / _failure_name(job.process)).touch()  # tells the first process; an empty file fits on a full disk
        raise RunError(f"cannot write {folder / job.file}: {error}; the older checkpoints are intact") from error


def _report_name(process: int) -> str:
    return f".report-{process:05d}.json"


def _failure_name(process: int) -> str:
    return f".failed-{process:05d}"


def _wait_for_report(path: Path, process: int) -> dict:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not path.exists():
        if (path.parent / _failure_name(process)).exists():
            raise OSError(f"process {process} could not write its part; its log says why")
        if time.monotonic() > deadline:
            raise OSError(
                f"process {process} has not written its part within {PATIENCE_SECONDS} s; its log may say why"
            )
        time.sleep(_POLL_SECONDS)
    report = json.loads(path.read_text())
    path.unlink()
    return report
