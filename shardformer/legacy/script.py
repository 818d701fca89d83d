"""Runs an unedited script as `python SCRIPT.py` would run it, with the removed names put back."""

import os
import sys
import warnings
from pathlib import Path
from types import TracebackType

import jax

from shardformer.config import Config
from shardformer.devices import processes
from shardformer.errors import UsageError
from shardformer.legacy import array_members, frozen_dicts
from shardformer.legacy.install import install, short_report
from shardformer.legacy.spawned_script import run_as_main


def run(script: str, arguments: list[str], verbose: bool = False, **options: bool) -> None:
    """Ends as the script does: SystemExit with its status, or with 1 after its traceback (130 for Ctrl-C).

    sys.argv, sys.path and the names stay as the script had them: its threads and exit handlers may still run.
    """
    if not os.path.isfile(script):
        raise UsageError(f"{script}: no such script")
    _join_processes()
    _keep_frozen_dicts(Path(script))
    report = install(**options)
    print(report if verbose else short_report(), file=sys.stderr)
    _ignore_warnings()
    sys.argv = [script, *arguments]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    path = os.path.abspath(script)
    try:
        run_as_main(path, **options)
    except SystemExit:
        raise
    except BaseException as error:
        array_members.advise(error)
        error.__traceback__ = _from_script(error.__traceback__, path)
        sys.excepthook(type(error), error, error.__traceback__)
        raise SystemExit(130 if isinstance(error, KeyboardInterrupt) else 1) from None


def _ignore_warnings() -> None:
    """Ignores warnings about what unedited code cannot write otherwise."""
    warnings.filterwarnings("ignore", "`with mesh:`", DeprecationWarning)
    # jax.host_count and its siblings, as long as jax has them: "jax.process_count has been renamed to ...".
    warnings.filterwarnings("ignore", r"jax\.process_\w+ has been renamed to", UserWarning)


def _keep_frozen_dicts(script: Path) -> None:
    if frozen_dicts.VARIABLE in os.environ:
        return
    if sign := frozen_dicts.sign_of_old_flax(script):
        os.environ[frozen_dicts.VARIABLE] = "true"
        print(f"shardformer.legacy: {frozen_dicts.VARIABLE}=true, because {sign}", file=sys.stderr)


def _join_processes() -> None:
    """The processes of a pod found each other without a call then."""
    processes.join_processes(Config())
    if jax.distributed.is_initialized():
        jax.distributed.initialize = _do_nothing  # a second call would fail


def _do_nothing(*_, **__) -> None:
    pass


def _from_script(traceback: TracebackType | None, script: str) -> TracebackType | None:
    """The traceback from the script's first frame on; None if the script did not even parse."""
    while traceback is not None and traceback.tb_frame.f_code.co_filename != script:
        traceback = traceback.tb_next
    return traceback
