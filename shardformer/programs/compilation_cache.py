"""The folder of compiled programs: a command that is started again compiles nothing."""

import contextlib
import functools
import glob
import os
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from jax.experimental.compilation_cache.compilation_cache import reset_cache

from shardformer.config import Config
from shardformer.files import make_folder
from shardformer.programs import kept_program
from shardformer.programs.processor import describe_processor
from shardformer.programs.program_store import Gather, ProgramStore, say_not_kept
from shardformer.storage import BucketPath, bucket_path, location, on_disk

PROBLEM = re.compile(
    r"Error (?P<action>reading|writing) persistent compilation cache entry for '(?P<program>.*?)': (?P<why>.*)",
    re.DOTALL,
)

WRONG_WHEN_LOADED = (
    "XLA would load them with errors on several CPU devices (those of dp alone with zero=0 are kept, without lbfgs)"
)


def keep_compiled_programs(config: Config, gather: Gather) -> None:
    """Sets the folder of compiled programs; call it after the processes have joined, before the first `programs.jit`.

    A folder that JAX has already (JAX_COMPILATION_CACHE_DIR) stays. Several processes use a store of their own: JAX's
    entries lack the order of the devices in the mesh. With hosts interleaved along dp, a process was given the program
    of another order, and computed other numbers. On CPU devices, only process 0 finds its entries again. The store
    needs JAX's cache to be off, because XLA cannot serialize a program again that this cache has loaded.

    Programs that XLA loads with errors are not kept, even if the user has chosen a folder.
    """
    settings: Any = jax.config  # a type checker does not know its keys
    kept_program.use_store(None)
    if not loads_correctly(config):
        if config.program_cache not in ("auto", "none") or os.environ.get("JAX_COMPILATION_CACHE_DIR"):
            print(f"compiled programs are not kept: {WRONG_WHEN_LOADED}", file=sys.stderr, flush=True)
        settings.update("jax_enable_compilation_cache", False)
        reset_cache()  # JAX has looked at its settings already, if a program was compiled before
        return
    if config.program_cache == "none" or settings.jax_compilation_cache_dir:
        return
    if jax.process_count() > 1:
        kept_program.use_store(ProgramStore(find_shared_folder(config), gather))
        return
    folder = find_folder() if config.program_cache == "auto" else on_disk(config.program_cache, "program_cache")
    try:
        make_folder(folder)
    except OSError as error:  # JAX would warn at each program
        say_not_kept(f"{folder} cannot be made ({error.strerror})")
        return
    _add_checksums()
    warnings.showwarning = _WarningsInALine(folder, warnings.showwarning)
    settings.update("jax_compilation_cache_dir", str(folder))
    quickest = settings.jax_persistent_cache_min_compile_time_secs  # JAX's default, 1, is more than most programs take
    settings.update("jax_persistent_cache_min_compile_time_secs", min(quickest, 0.1))


def loads_correctly(config: Config) -> bool:
    """Returns whether the run's programs compute the same after XLA has written and read them.

    On a CPU they do not if collectives run in a loop and outside. The compiled program runs them in one order, but in
    a loaded one a loop no longer waits for the rest. Then two devices may wait in different collectives for ever, or
    one receives numbers of another collective: with zero=3 on 8 devices within some hundred steps (jax 0.10.2). With
    dp alone and zero=0, training has no collective in a loop but in the line search of lbfgs; drawing text has some in
    a loop, and all others wait for that loop.
    """
    if jax.default_backend() != "cpu" or config.devices == 1:
        return True
    return config.dp == config.devices and config.zero == 0 and config.optimizer != "lbfgs"


@functools.cache
def _add_checksums() -> None:
    """Makes zstandard, if JAX packs programs with it, add a checksum: a flipped bit in a program ends the process."""
    with contextlib.suppress(ImportError):
        import zstandard

        module: Any = zstandard
        module.ZstdCompressor = functools.partial(zstandard.ZstdCompressor, write_checksum=True)


class _WarningsInALine:
    """Shows JAX's warnings about its cache in one line each, and every other warning by `show`.

    JAX never writes an entry again, so a damaged one is deleted: the program that is compiled now takes its place.
    """

    def __init__(self, folder: Path, show: Callable):
        self._folder, self._show = folder, show
        self._is_kept = True

    def __call__(self, message, *details, **more) -> None:
        found = PROBLEM.match(str(message))
        if not found:
            self._show(message, *details, **more)
        elif found["action"] == "reading":
            self._delete(found["program"])
        elif self._is_kept:
            self._is_kept = False
            say_not_kept(found["why"].partition("\n")[0])

    def _delete(self, program: str) -> None:
        print(f"a kept program is damaged and is compiled again: {program}", file=sys.stderr, flush=True)
        for entry in self._folder.glob(f"{glob.escape(program)}-*-cache"):
            with contextlib.suppress(OSError):
                entry.unlink()


def find_folder() -> Path:
    """Returns the folder for this kind of CPU: its programs would crash on a CPU that lacks their instructions."""
    return bucket_path.cache_folder() / f"programs-{describe_processor()}"


def find_shared_folder(config: Config) -> Path | BucketPath:
    """Returns the folder for all processes of a run: beside the run, on the disk or in the bucket that they share."""
    if config.program_cache == "auto":
        return location(config.out).parent / ".programs"
    return on_disk(config.program_cache, "program_cache")
