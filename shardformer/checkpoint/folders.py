"""The step folders of a run on disk: what is visible is complete, and a kill at any moment loses no complete one.

`.step_00000040.tmp-TOKEN` is being written or deleted and can be removed; `step_00000040.damaged` was found to be so.
Only one process writes here at a time: the run's lock sees to it.
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
_TEMPORARY = re.compile(r"\.step_\d{8,18}\.tmp-\w+")


def step_folder(out: Path, step: int) -> Path:
    return Path(out) / f"step_{step:08d}"


def temporary_folder(out: Path, step: int, token: str) -> Path:
    return Path(out) / f".step_{step:08d}.tmp-{token}"


def list_steps(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    out = Path(out)
    if not out.is_dir():
        return []
    found = (_VISIBLE.fullmatch(path.name) for path in out.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match and step_folder(out, int(match[1])).name == match[0])


def newest_step_folder(out: Path) -> Path | None:
    steps = list_steps(out)
    return step_folder(out, steps[-1]) if steps else None


@contextlib.contextmanager
def publishing(out: Path, step: int, token: str) -> Iterator[Path]:
    """A temporary folder to fill: it takes the step's name when the block ends, and is removed when the block fails."""
    out, target, temporary = Path(out), step_folder(out, step), temporary_folder(out, step, token)
    try:
        remove_temporary(out, but_not=temporary)
        temporary.mkdir(exist_ok=True)
        yield temporary
        for path in temporary.iterdir():
            files.sync(path)
        files.sync(temporary)
        if os.path.lexists(target) and not target.is_dir():  # a stray file, or a link that leads nowhere
            set_aside(out, step)
        os.rename(temporary, target)
        try:
            files.sync(out)
        except OSError:
            os.rename(target, temporary)
            raise
    except BaseException as error:
        remove_temporary(out)
        if isinstance(error, OSError):
            raise RunError(f"cannot write the checkpoint {target}: {error}; the older ones are intact") from error
        raise


def prune(out: Path, keep: int, also: set[int], every: int = 0) -> None:
    """Deletes all checkpoints but the newest `keep`, the steps in `also` and the multiples of `every`."""
    steps = list_steps(out)
    try:
        for step in steps[: max(len(steps) - keep, 0)]:
            if step not in also and not (every and step % every == 0):
                # Hidden first, so that a kill on the way leaves no half checkpoint visible.
                hidden = temporary_folder(out, step, "deleted")
                os.rename(step_folder(out, step), hidden)
                _delete(hidden)
    except OSError as error:
        raise RunError(f"cannot delete old checkpoints in {out}: {error}") from error


def set_aside(out: Path, step: int) -> Path:
    """Gives a damaged checkpoint a name that nothing reads, counts or deletes."""
    names = (f"{step_folder(out, step).name}.damaged{suffix}" for suffix in ("", *(f"-{n}" for n in range(2, 1000))))
    path = next(Path(out) / name for name in names if not os.path.lexists(Path(out) / name))
    os.rename(step_folder(out, step), path)
    return path


def remove_temporary(out: Path, but_not: Path | None = None) -> None:
    """Removes what killed processes and failed saves left, as far as the system lets it."""
    with contextlib.suppress(OSError):
        for path in [path for path in out.iterdir() if _TEMPORARY.fullmatch(path.name) and path != but_not]:
            with contextlib.suppress(OSError):
                _delete(path)


def _delete(path: Path) -> None:
    """A folder with all that is in it; of a link, the link alone."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()
