"""Step folders on disk: what is visible is complete, and a kill at any moment loses no complete one.

`.step_00000040.tmp-TOKEN` is being written or deleted and is worth nothing; `step_00000040.damaged` was found to be so.
Whoever writes here is alone: the run's lock sees to it.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardformer import files
from shardformer.errors import RunError

_VISIBLE = re.compile(r"step_(\d{8,18})")
_HIDDEN = re.compile(r"\.step_\d{8,18}\.tmp-\w+")


def folder(out: Path, step: int) -> Path:
    return Path(out) / f"step_{step:08d}"


def temporary(out: Path, step: int, token: str) -> Path:
    return Path(out) / f".step_{step:08d}.tmp-{token}"


def steps(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    out = Path(out)
    if not out.is_dir():
        return []
    found = (_VISIBLE.fullmatch(path.name) for path in out.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match and folder(out, int(match[1])).name == match[0])


def latest(out: Path) -> Path | None:
    found = steps(out)
    return folder(out, found[-1]) if found else None


@contextlib.contextmanager
def published(out: Path, step: int, token: str) -> Iterator[Path]:
    """A temporary folder to fill; it takes the step's name when the block ends, or vanishes when the block fails."""
    out, target, filling = Path(out), folder(out, step), temporary(out, step, token)
    try:
        files.make_folder(out)
        tidy(out, but=filling)
        filling.mkdir(exist_ok=True)
        yield filling
        for path in filling.iterdir():
            files.sync(path)
        files.sync(filling)
        os.rename(filling, target)
        try:
            files.sync(out)
        except OSError:
            os.rename(target, filling)
            raise
    except BaseException as error:
        with contextlib.suppress(OSError):
            tidy(out)
        if isinstance(error, OSError):
            raise RunError(f"cannot write the checkpoint {target}: {error}; the older ones are intact") from error
        raise


def prune(out: Path, keep: int, also: set[int], every: int = 0) -> None:
    """Deletes all but the newest `keep`, the steps in `also` and those that `every` divides."""
    found = steps(out)
    try:
        for step in found[: max(len(found) - keep, 0)]:
            if step not in also and not (every and step % every == 0):
                # Under a hidden name first, so that a kill on the way leaves no half checkpoint in sight.
                doomed = temporary(out, step, "deleted")
                os.rename(folder(out, step), doomed)
                shutil.rmtree(doomed)
    except OSError as error:
        raise RunError(f"cannot delete old checkpoints in {out}: {error}") from error


def set_aside(out: Path, step: int) -> Path:
    """Gives a damaged checkpoint a name that nothing reads, counts or deletes."""
    names = (f"{folder(out, step).name}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    path = next(Path(out) / name for name in names if not (Path(out) / name).exists())
    os.rename(folder(out, step), path)
    return path


def tidy(out: Path, but: Path | None = None) -> None:
    """Removes what killed processes and failed saves left."""
    for path in [path for path in out.iterdir() if _HIDDEN.fullmatch(path.name) and path != but]:
        shutil.rmtree(path)
