"""JAX's persistent cache of compiled programs: a command that is started again compiles nothing."""

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import jax

from shardformer.config import Config
from shardformer.files import make_folder
from shardformer.storage import bucket_path, on_disk


def keep_compiled_programs(config: Config) -> None:
    """Sets the folder of JAX's cache; call it after the processes have joined.

    A folder that JAX has already (JAX_COMPILATION_CACHE_DIR) stays. Several processes keep nothing: JAX's entries lack
    the order of the devices in the mesh. With hosts interleaved along dp, a process was given the program of
    another order, and computed other numbers.
    """
    settings: Any = jax.config  # a type checker does not know its keys
    if config.program_cache == "none" or jax.process_count() > 1 or settings.jax_compilation_cache_dir:
        return
    folder = find_folder() if config.program_cache == "auto" else on_disk(config.program_cache, "program_cache")
    try:
        make_folder(folder)
    except OSError as error:  # JAX would warn at each program
        print(f"compiled programs are not kept: {folder} cannot be made ({error.strerror}); program_cache=FOLDER keeps "
              "them elsewhere, program_cache=none keeps none", file=sys.stderr, flush=True)  # fmt: skip
        return
    settings.update("jax_compilation_cache_dir", str(folder))
    quickest = settings.jax_persistent_cache_min_compile_time_secs  # JAX's default, 1, is more than most programs take
    settings.update("jax_persistent_cache_min_compile_time_secs", min(quickest, 0.1))


def find_folder() -> Path:
    """Returns the folder for this kind of CPU: its programs would crash on a CPU that lacks their instructions."""
    return bucket_path.cache_folder() / f"programs-{_describe_cpu()}"


def _describe_cpu() -> str:
    """Returns a short hash of the processor's features, or of the machine's name if they are unknown."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        described = "".join(os.uname())
    return hashlib.sha256(described.encode()).hexdigest()[:12]
