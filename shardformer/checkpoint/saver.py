"""Saves in the background, one at a time, by all processes together.

Each process writes its own file into one temporary folder; the first waits for the others' files, adds the manifest
and publishes. The background threads meet in that folder alone, so that they never come between a step's collectives.
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
from shardformer.checkpoint.snapshot import Snapshot, take
from shardformer.errors import RunError

PATIENCE = 600  # seconds that the first process waits for the others' files
_POLL = 0.02


class Saver:
    """Every process calls the same methods in the same order; `wait` before `save`."""

    def __init__(self, out: Path):
        self._out = Path(out)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future | None = None

    def save(self, step: int, copy: Snapshot, texts: dict[str, str], then: Callable[[], None] = lambda: None) -> None:
        """Begins to write; `then` runs in the first process once the checkpoint is visible."""
        if self._writing:
            raise RuntimeError("a save is in flight; wait for it first")
        token = processes.text_of_first_process(secrets.token_hex(4))
        write = _publish if jax.process_index() == 0 else _contribute
        job = _Job(self._out, step, token, copy, texts, then, jax.process_index(), jax.process_count())
        self._writing = self._thread.submit(write, job)

    @property
    def done(self) -> bool:
        return self._writing is None or self._writing.done()

    def wait(self) -> None:
        """Until the save in flight is done; what went wrong in any process is raised in all of them."""
        if self._writing is None:
            return
        failure, self._writing, failed = "", None, self._writing
        try:
            failed.result()
        except RunError as error:
            failure = str(error)
        if failure := processes.first_message_from_any_process(failure):
            if jax.process_index() == 0:
                with contextlib.suppress(OSError):
                    folders.tidy(self._out)  # parts that others began after this process had failed; now all are done
            raise RunError(failure)

    def close(self, wait: bool = True) -> None:
        self._thread.shutdown(wait)


def save(out: Path, step: int, state, texts: dict[str, str]) -> Path:
    """Writes `state` (jax.Arrays) and `texts` (file name -> content) as one checkpoint; every process must call it."""
    saver = Saver(out)
    try:
        saver.save(step, take(state), texts)
        saver.wait()
    finally:
        saver.close()
    return folders.folder(out, step)


@dataclasses.dataclass(frozen=True)
class _Job:
    out: Path
    step: int
    token: str
    copy: Snapshot
    texts: dict[str, str]
    then: Callable[[], None]
    process: int
    processes: int

    @property
    def file(self) -> str:
        return array_files.file_name(self.process, self.processes)


def _publish(job: _Job) -> None:
    with folders.published(job.out, job.step, job.token) as folder:
        pieces, nbytes = array_files.write(folder / job.file, job.copy.slices())
        arrays = {job.file: nbytes}
        for process in range(1, job.processes):
            report = _await(folder / _report_name(process), process)
            arrays |= report["files"]
            for name, parts in report["pieces"].items():
                pieces.setdefault(name, []).extend(Piece(**part) for part in parts)
        leaves = {
            name: dataclasses.replace(leaf, pieces=tuple(pieces.get(name, ())))
            for name, leaf in job.copy.leaves.items()
        }
        documents.write(folder, leaves, arrays, job.texts)
    job.then()


def _contribute(job: _Job) -> None:
    folder = folders.temporary(job.out, job.step, job.token)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        report = folder / _report_name(job.process)
        pieces, nbytes = array_files.write(folder / job.file, job.copy.slices())
        files.sync(folder / job.file)
        pieces = {name: [dataclasses.asdict(piece) for piece in parts] for name, parts in pieces.items()}
        writing = report.with_suffix(".tmp")
        writing.write_text(json.dumps({"files": {job.file: nbytes}, "pieces": pieces}))
        os.rename(writing, report)  # whole as soon as it is visible
    except OSError as error:
        with contextlib.suppress(OSError):
            (folder / _failure_name(job.process)).touch()  # tells the first process; a full disk has room for no bytes
        raise RunError(f"cannot write {folder / job.file}: {error}; the older checkpoints are intact") from error


def _report_name(process: int) -> str:
    return f".report-{process:05d}.json"


def _failure_name(process: int) -> str:
    return f".failed-{process:05d}"


def _await(path: Path, process: int) -> dict:
    deadline = time.monotonic() + PATIENCE
    while not path.exists():
        if (path.parent / _failure_name(process)).exists():
            raise OSError(f"process {process} could not write its part; its log says why")
        if time.monotonic() > deadline:
            raise OSError(f"process {process} has not written its part within {PATIENCE} s; its log may say why")
        time.sleep(_POLL)
    report = json.loads(path.read_text())
    path.unlink()
    return report
