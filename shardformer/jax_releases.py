"""The releases of JAX that this package runs on, and what it does about those with a known fault.

The only statement of this range besides pyproject.toml, which a test compares with it. Importing this imports no JAX:
XLA reads its flags at the first use of a device, and commands set more of them before that.
"""

import os
import re

from shardformer.errors import UsageError

OLDEST = (0, 10)
# Releases whose XLA miscompiles or crashes in fusions of its CPU library YNN. 0.10.2 is the newest for Python 3.11.
# 0.10.2: vmap(lambda row: sum((matrix @ row) ** 2)) is wrong in its last rows (jax#39103); a sum over an axis of
#         arrays of rank 7 crashes (jax#40412).
# 0.11.0: the crash, for arrays of rank 8 (jax#39257).
# 0.10.0, 0.10.1, 0.11.1 and 0.12.0 compile the first two correctly and run the third.
#
# Without these fusions a step of shakespeare_cpu takes 8 to 15% more time. So `legacy` and `verify_function`, which run
# anyone's programs, leave them out. Commands keep them for this package's programs, which tests compare with
# references. `Session.train` warns a program of the user, `--version` and a failed `verify` print the line.
FAULTY_FUSIONS = ("0.10.2", "0.11.0")
FUSIONS = "--xla_cpu_experimental_ynn_fusion_type"
SLOW_SLICES = ("0.11.1",)  # a small dynamic_update_slice in a loop copies its whole buffer on a CPU (jax#40101)


def check() -> None:
    """Raises UsageError for a JAX that is too old."""
    version = find_version("jax")
    if version and _parse(version) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"jax {version} is installed; shardformer needs jax>={oldest}: pip install -U jax")


def describe_faults() -> str:
    """Returns a line on the installed release's faults on a CPU; '' if it has none, or the user has set the flag."""
    version = find_version("jaxlib")
    if version in FAULTY_FUSIONS and FUSIONS not in os.environ.get("XLA_FLAGS", ""):
        return (
            f"jaxlib {version} compiles some programs wrongly on a CPU (jax#39103), none of shardformer's as far as is "
            f"known. To rule it out: XLA_FLAGS={FUSIONS}= (a step takes about a tenth longer)"
        )
    if version in SLOW_SLICES:
        return f"jaxlib {version} is slow where a loop changes a part of a buffer (jax#40101); newer releases are not"
    return ""


def avoid_faulty_fusions() -> None:
    """Makes XLA leave out fusions that the installed release compiles wrongly; has no effect after a device was used.

    A flag that XLA_FLAGS has already stays.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    if FUSIONS not in flags and find_version("jaxlib") in FAULTY_FUSIONS:
        os.environ["XLA_FLAGS"] = f"{flags} {FUSIONS}=".strip()


def find_version(package: str) -> str:
    """Returns the version of an installed package; '' if it is not installed."""
    from importlib import metadata  # half of what --help would import

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _parse(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", version)[:2])
