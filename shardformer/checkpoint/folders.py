"""Step folders on disk: what is visible is complete, and a kill at any moment loses no complete one.

Hidden names: `.step_00000040.tmp-PID` is being written or deleted and is worth nothing; `.step_00000040.old-PID` was
complete and stands aside while its replacement takes the name.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardformer.errors import RunError

_VISIBLE = re.compile(r"step_(\d{8,18})")
_HIDDEN = re.compile(r"\.step_(\d{8,18})\.(tmp|old)-(\d{1,9})")


def folder(out: Path, step: int) -> Path:
    return Path(out) / f"step_{step:08d}"


def steps(out: Path) -> list[int]:
    """The steps that have a checkpoint, in order."""
    out = Path(out)
    if not out.is_dir():
        return []
    with contextlib.suppress(OSError):  # a folder that may only be read still lists what it shows
        _bring_back(out)
    found = (_VISIBLE.fullmatch(path.name) for path in out.iterdir() if path.is_dir())
    return sorted(int(match[1]) for match in found if match and folder(out, int(match[1])).name == match[0])


def latest(out: Path) -> Path | None:
    found = steps(out)
    return folder(out, found[-1]) if found else None


def document(checkpoint: Path, name: str) -> str:
    """The text of one of the small files that lie beside the arrays."""
    path = Path(checkpoint) / name
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunError(f"{checkpoint} has no {name}; it is no checkpoint or an incomplete one") from None
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None


def prune(out: Path, keep: int, also: set[int]) -> None:
    """Deletes all checkpoints but the newest `keep` and the steps in `also`."""
    found = steps(out)
    try:
        if found:
            _tidy(out)
        for step in found[: max(len(found) - keep, 0)]:
            if step not in also:
                _delete(out, step, folder(out, step))
    except OSError as error:
        raise RunError(f"cannot delete old checkpoints in {out}: {error}") from error


@contextlib.contextmanager
def published(out: Path, step: int) -> Iterator[Path]:
    """A temporary folder to fill; it takes the step's name when the block ends, or vanishes when the block fails."""
    target, temporary, aside = folder(out, step), _hidden(out, step, "tmp"), _hidden(out, step, "old")
    try:
        out.mkdir(parents=True, exist_ok=True)
        _tidy(out)
        temporary.mkdir()
        yield temporary
        for path in [*temporary.iterdir(), temporary]:
            _sync(path)
        if target.exists():
            os.rename(target, aside)
        os.rename(temporary, target)
        _sync(out)
        _tidy(out)
    except BaseException as error:
        with contextlib.suppress(OSError):
            _tidy(out)
        if isinstance(error, OSError):
            raise RunError(
                f"cannot write the checkpoint {target}: {error}; the older checkpoints are intact"
            ) from error
        raise


def _hidden(out: Path, step: int, kind: str) -> Path:
    return Path(out) / f".step_{step:08d}.{kind}-{os.getpid()}"


def _tidy(out: Path) -> None:
    """Removes what killed processes left, after bringing back what they had put aside."""
    _bring_back(out)
    for path, step, kind in _left_behind(out):
        if kind == "old":
            _delete(out, step, path)
        else:
            shutil.rmtree(path)


def _bring_back(out: Path) -> None:
    """A kill between the two renames of a replacement leaves the complete one hidden: show it again."""
    for path, step, kind in _left_behind(out):
        if kind == "old" and not folder(out, step).exists():
            os.rename(path, folder(out, step))


def _left_behind(out: Path) -> list[tuple[Path, int, str]]:
    matches = [(path, _HIDDEN.fullmatch(path.name)) for path in out.iterdir()]
    return [(path, int(match[1]), match[2]) for path, match in matches if match and not _is_at_work(int(match[3]))]


def _is_at_work(pid: int) -> bool:
    """Whether another live process has this id. Our own is from an earlier life: in a container ids come again."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass  # it is another user's
    return True


def _delete(out: Path, step: int, path: Path) -> None:
    """Under a hidden name, so that a kill on the way leaves no half checkpoint in sight."""
    doomed = _hidden(out, step, "tmp")
    os.rename(path, doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
