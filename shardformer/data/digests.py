"""sha256 digests of files, remembered until a file changes.

A digest is remembered with the file's size, inode and times. The change time (ctime) is among them: it moves with every
write, also where a copy keeps the modification time (`cp -p`, `rsync -t`).
"""

import concurrent.futures
import contextlib
import hashlib
import io
import json
import os
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import cast

from shardformer.errors import UsageError
from shardformer.files import make_folder, open_regular, read_text, replacing
from shardformer.storage import cache_folder

FOLDER = "digests"  # in the cache
OWN = "own:"  # at the beginning of fingerprints of batches that a program supplies
PREPARED = "2-"  # at the beginning of fingerprints of prepared data; those of texts in memory have no mark
MAX_BYTES = 1 << 30
SETTLED = 2.0  # seconds: a younger file may change with the same mtime
Stamp = list[int]


def digest_files(paths: Sequence[Path], *, remembered: bool = True, settled: float = SETTLED) -> list[str]:
    """Returns the sha256 of each file; remembered=False reads all of them.

    settled: seconds without a change after which the digest of a file is remembered.
    """
    names = "\n".join(os.path.abspath(path) for path in paths)
    memory = cache_folder() / FOLDER / f"{hashlib.sha256(os.fsencode(names)).hexdigest()[:16]}.json"
    known = _read_memory(memory) if remembered else {}
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        result = list(pool.map(lambda path: _digest_unless_known(path, known, settled), paths))
    unchanged = [(os.path.abspath(path), pair) for path, pair in zip(paths, result, strict=True) if pair[0]]
    fresh = dict(unchanged)
    if fresh and fresh != known:
        with contextlib.suppress(OSError):  # a cache that cannot be written costs time only
            make_folder(memory.parent)
            with replacing(memory) as temporary:
                temporary.write_text(json.dumps(fresh))
    return [digest for _, digest in result]


def stamp_file(path: Path) -> Stamp:
    """Returns values of which at least one changes with the file."""
    result = path.stat()
    return [result.st_size, result.st_mtime_ns, result.st_ctime_ns, result.st_ino, result.st_dev]


def _digest_unless_known(path: Path, known: dict, settled: float) -> tuple[Stamp | None, str]:
    """Returns the digest with the stamp that it may be remembered by, if the file has not changed lately."""
    try:
        before = stamp_file(path)
        stamp, digest = known.get(os.path.abspath(path), (None, ""))
        if stamp == before:
            return stamp, digest
        with open_regular(path) as file:
            digest = hashlib.file_digest(cast(io.BufferedReader, file), "sha256").hexdigest()
        is_settled = time.time() - max(before[1], before[2]) / 1e9 > settled
        return (before if is_settled and stamp_file(path) == before else None), digest
    except OSError as error:
        raise UsageError(f"cannot read {path}: {error.strerror or error}") from None


def _read_memory(path: Path) -> dict:
    """Returns {path: (stamp, digest)}; nothing if the file is missing or damaged."""
    try:
        content = json.loads(read_text(path, MAX_BYTES))
        return {name: (list(stamp), str(digest)) for name, (stamp, digest) in content.items()}
    except (OSError, ValueError, TypeError, AttributeError, RecursionError):
        return {}


def join_fingerprints(fingerprints: Iterable[str], digest: str) -> str:
    """Returns the digest as the fingerprint of data from two or more sources."""
    return PREPARED + digest if any(fingerprint.startswith(PREPARED) for fingerprint in fingerprints) else digest
