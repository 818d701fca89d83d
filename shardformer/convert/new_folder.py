"""The folder that a conversion writes, which is whole or not there, and what it says of it at the end."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardformer import checkpoint
from shardformer.convert.gptj import Leaves
from shardformer.errors import UsageError
from shardformer.files import sync
from shardformer.storage import BucketPath, bucket
from shardformer.training.run_folder import Run


def check_free(target: Path | BucketPath) -> None:
    if isinstance(target, BucketPath):
        if set(bucket.list_objects(target)) - {".lock"}:
            raise UsageError(f"{target} exists; name a folder that does not")
        return
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists; name a folder that does not")
    if file := next((path for path in target.parents if path.exists() and not path.is_dir()), None):
        raise UsageError(f"{target} cannot be made: {file} is a file; name another folder")


def describe_size(params: Leaves) -> str:
    return f"{sum(math.prod(leaf.shape) for leaf in params.values()) / 1e6:,.2f}M parameters"


def describe_average(run: Run, taken: bool) -> str:
    """What became of the run's average, for the last line."""
    if taken:
        return "; the weights are their average"
    return "; the average of the weights is left out (ema=true takes it instead)" if run.config.ema else ""


def new_folder(target: Path | BucketPath) -> contextlib.AbstractContextManager[Path | BucketPath]:
    """A folder to fill that becomes `target` at the end of the block, stored safely, or vanishes."""
    return _new_folder_in_bucket(target) if isinstance(target, BucketPath) else _new_folder_on_disk(target)


@contextlib.contextmanager
def _new_folder_in_bucket(target: BucketPath) -> Iterator[BucketPath]:
    """Filled in place: it is a run only when its config.json is there, which comes last."""
    with checkpoint.lock_folder(target):
        check_free(target)
        try:
            yield target
        except BaseException:
            bucket.delete(target / name for name in bucket.list_objects(target) if name != ".lock")
            raise


@contextlib.contextmanager
def _new_folder_on_disk(target: Path) -> Iterator[Path]:
    hidden = target.with_name(f".{target.name}.tmp")  # one name for all processes, so that none's leavings stay
    whole = hidden / "whole"
    try:
        with checkpoint.lock_folder(hidden):
            check_free(target)  # another process may have written it since
            shutil.rmtree(whole, ignore_errors=True)
            try:
                whole.mkdir()
                yield whole
                for path in (*whole.rglob("*"), whole):
                    sync(path)
                os.rename(whole, target)
                sync(target.parent)
            finally:
                shutil.rmtree(whole, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):
            hidden.rmdir()
