"""The folder that a conversion writes completely or not at all, and the parts of its last line."""

import contextlib
import math
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from shardformer import checkpoint
from shardformer.config import Config
from shardformer.convert.leaves import Leaves
from shardformer.errors import RunError, UsageError
from shardformer.files import check_no_link, sync
from shardformer.model import master_weights
from shardformer.quantized import rounded_weights
from shardformer.storage import BucketPath, bucket
from shardformer.training.run_folder import Run


def check_free(target: Path | BucketPath) -> None:
    """Rejects a target that exists or cannot be created."""
    if isinstance(target, BucketPath):
        if set(bucket.list_objects(target)) - {".lock"}:
            raise UsageError(f"{target} exists; name a folder that does not")
        return
    if target.exists() or target.is_symlink():
        raise UsageError(f"{target} exists; name a folder that does not")
    if file := next((path for path in target.parents if path.exists() and not path.is_dir()), None):
        raise UsageError(f"{target} cannot be made: {file} is a file; name another folder")


def describe_size(params: Leaves) -> str:
    """Formats the number of parameters."""
    return f"{sum(math.prod(leaf.shape) for leaf in params.values()) / 1e6:,.2f}M parameters"


def describe_form(config: Config) -> str:
    """Describes the form of the weights of a run that was written, if they are codes."""
    return f", stored as weights={config.stored.weights}" if config.stored.quantized else ""


def describe_source(run: Run) -> str:
    """Describes what became of a run's codes in a format of float weights."""
    return f", dequantised from weights={run.config.stored.weights}" if run.config.stored.quantized else ""


def describe_average(run: Run, taken: bool) -> str:
    """Describes what became of the run's average, for the last line."""
    if taken:
        return "; the weights are their average"
    return "; the average of the weights is left out (ema=true takes it instead)" if run.config.training.ema else ""


def describe_rounding(run: Run, step: int) -> str:
    """Warns of a step of `quantize_aware` whose weights are float ones, for the last line."""
    if run.config.stored.quantize_aware == "none" or master_weights.have_code_values(run.config, step):
        return ""
    first = rounded_weights.find_first_rounded(run.config)
    return f"; step {step} is before the rounding of quantize_aware, which starts after step {first}"


def new_folder(target: Path | BucketPath) -> contextlib.AbstractContextManager[Path | BucketPath]:
    """Yields a folder to fill, which becomes `target` at the end of the block and is deleted after an error."""
    return _new_folder_in_bucket(target) if isinstance(target, BucketPath) else new_folder_on_disk(target)


@contextlib.contextmanager
def _new_folder_in_bucket(target: BucketPath) -> Iterator[BucketPath]:
    """Fills the target itself: it is a run only with its config.json, which is written last."""
    with checkpoint.lock_folder(target):
        check_free(target)
        try:
            yield target
        except BaseException:
            bucket.delete(target / name for name in bucket.list_objects(target) if name != ".lock")
            raise


@contextlib.contextmanager
def new_folder_on_disk(target: Path) -> Iterator[Path]:
    """Yields a folder on a disk to fill; its files are synced before it becomes `target`."""
    hidden = target.with_name(f".{target.name}.tmp")  # the same name for all processes, so that the next one cleans up
    complete = hidden / "complete"
    check_no_link(hidden)
    try:
        with checkpoint.lock_folder(hidden):
            check_free(target)  # another process may have written it since
            shutil.rmtree(complete, ignore_errors=True)
            try:
                complete.mkdir()
                yield complete
                for path in (*complete.rglob("*"), complete):
                    sync(path)
                os.rename(complete, target)
                sync(target.parent)
            except OSError as error:
                if error.filename:
                    raise
                raise RunError(f"cannot write {target}: {error.strerror or error}") from None  # a full disk
            finally:
                shutil.rmtree(complete, ignore_errors=True)
    finally:
        with contextlib.suppress(OSError):
            hidden.rmdir()
