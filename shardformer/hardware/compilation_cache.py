"""JAX's persistent cache of compiled programs, where it is safe: the same command, started again, compiles nothing."""

import hashlib
import os
from pathlib import Path

import jax

from shardformer.config import Config
from shardformer.storage import bucket_path, on_disk


def keep_compiled_programs(config: Config) -> None:
    """Call once the processes are joined. A folder that JAX was given already (JAX_COMPILATION_CACHE_DIR) stays.

    Several processes keep nothing. Their entries in JAX's cache do not say in which order the mesh takes the devices:
    where hosts take turns along dp, a process was given the program of another order, and computed other numbers.
    """
    if config.program_cache == "none" or jax.process_count() > 1 or jax.config.jax_compilation_cache_dir:
        return
    folder = find_folder() if config.program_cache == "auto" else on_disk(config.program_cache, "program_cache")
    jax.config.update("jax_compilation_cache_dir", str(folder))
    quickest = jax.config.jax_persistent_cache_min_compile_time_secs  # JAX: 1, more than most take
    jax.config.update("jax_persistent_cache_min_compile_time_secs", min(quickest, 0.1))


def find_folder() -> Path:
    """Of this kind of machine: a CPU's programs end a process on another kind that lacks their instructions."""
    return bucket_path.cache_folder() / f"programs-{_describe_cpu()}"


def _describe_cpu() -> str:
    """A short hash of what the processor can do; of the machine's name where nothing tells."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        described = next(line for line in lines if line.startswith(("flags", "Features")))
    except (OSError, StopIteration):
        described = "".join(os.uname())
    return hashlib.sha256(described.encode()).hexdigest()[:12]
