"""The software of a process. Processes with different code would train one model by different rules."""

import functools
import hashlib
import platform
from pathlib import Path

import jax
import jaxlib

import shardformer

PACKAGE = Path(shardformer.__file__).parent


@functools.cache
def describe_software() -> str:
    """Returns the versions and a hash of this package's source files in one line."""
    python = ".".join(platform.python_version_tuple()[:2])
    versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}, Python {python}"
    return f"shardformer {shardformer.__version__} (code {_hash_sources(PACKAGE)}), {versions}"


def describe_difference(process: int, software: str, other: int, rest: str) -> str:
    """Returns the error for two processes with different software."""
    return f"process {process} runs {software}, process {other} runs {rest}; install the same on all machines"


def _hash_sources(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
