"""The step folders of a run: a visible checkpoint is complete, and a kill at any moment loses none of them.

Only one process writes here at a time: the one with the run's lock.
"""

import contextlib
import errno
import re
from collections.abc import Callable, Iterator

from shardformer.checkpoint.store import Location, Lock
from shardformer.checkpoint.stores import store_of
from shardformer.errors import RunError
from shardformer.storage import location

_STEP = re.compile(r"step_(\d{8,18})")
_FULL = (errno.ENOSPC, errno.EDQUOT)


def step_folder(out: Location | str, step: int) -> Location:
    return location(out) / f"step_{step:08d}"


def list_steps(out: Location | str) -> list[int]:
    """Returns the steps that have a checkpoint, in ascending order."""
    out = location(out)
    result = map(_STEP.fullmatch, store_of(out).list_complete(out))
    return sorted(int(match[1]) for match in result if match and step_folder(out, int(match[1])).name == match[0])


def newest_step_folder(out: Location | str) -> Location | None:
    steps = list_steps(out)
    return step_folder(out, steps[-1]) if steps else None


@contextlib.contextmanager
def publishing(
    out: Location, step: int, token: str, lock: Lock | None = None
) -> Iterator[tuple[Location, Callable[[str], None]]]:
    """Yields a temporary folder to fill, and a function that publishes it with a manifest; removes it on failure."""
    target, store = step_folder(out, step), store_of(out)
    temporary = store.temporary_folder(target, token)
    try:
        store.remove_temporary(out, but_not=temporary)
        store.make_temporary_folder(temporary)
        yield temporary, lambda manifest: store.publish(temporary, target, manifest.encode(), lock)
    except BaseException as error:
        store.remove_temporary(out)
        if isinstance(error, OSError):
            advice = "; free some space, and resume the run" if error.errno in _FULL else ""
            raise RunError(
                f"cannot write the checkpoint {target}: {error}; the older ones are intact{advice}"
            ) from error
        raise


def prune(out: Location | str, keep: int, also: set[int], every: int = 0) -> None:
    """Deletes all checkpoints except the newest `keep`, the steps in `also` and the multiples of `every`."""
    out = location(out)
    try:
        steps = list_steps(out)
        for step in steps[: max(len(steps) - keep, 0)]:
            if step not in also and not (every and step % every == 0):
                store_of(out).remove(step_folder(out, step))
    except OSError as error:
        raise RunError(f"cannot delete old checkpoints in {out}: {error}") from error


def set_aside(out: Location | str, step: int) -> Location:
    """Hides a damaged checkpoint, so that nothing reads, counts or deletes it; returns its new path."""
    out = location(out)
    return store_of(out).set_aside(step_folder(out, step))
