"""NVIDIA GPUs: what JAX needs of their driver, and the options of XLA that overlap their collectives with products."""

import importlib.util
import os
import shutil
import subprocess
from typing import NamedTuple

from shardformer.errors import UsageError
from shardformer.messages import log

# XLA ends a process at a flag that it does not know: tests/devices/test_gpu.py asks the installed jaxlib.
FLAGS = (
    "--xla_gpu_enable_latency_hiding_scheduler=true",
    "--xla_gpu_enable_pipelined_all_gather=true",
    "--xla_gpu_enable_pipelined_reduce_scatter=true",
    "--xla_gpu_enable_pipelined_all_reduce=true",
)


class Needs(NamedTuple):
    """The oldest driver and compute capability of JAX's plugin for a version of CUDA."""

    driver: int
    capability: float


# By the release notes of CUDA 12 and 13. Newest first, as JAX prefers.
PLUGINS = {"jax_cuda13_plugin": Needs(580, 7.5), "jax_cuda12_plugin": Needs(525, 5.2)}


def prepare() -> None:
    """Sets XLA's options for the GPUs of this machine; prints a line or raises UsageError if JAX cannot use them.

    Call it before the first use of a device. A flag that XLA_FLAGS has already stays.
    """
    gpus = _list_gpus() if _may_use_gpus() else []
    if not gpus:
        return
    plugin = next((name for name in PLUGINS if importlib.util.find_spec(name)), None)
    if not plugin:
        log.warning(
            f"{len(gpus)} NVIDIA GPUs are not used: JAX has no plugin for them; pip install 'shardformer[cuda]'"
        )
        return
    check(gpus, plugin)
    flags = os.environ.get("XLA_FLAGS", "")
    added = [flag for flag in FLAGS if flag.partition("=")[0] not in flags]
    os.environ["XLA_FLAGS"] = " ".join([flags, *added]).strip()


def check(gpus: list[tuple[str, float, float]], plugin: str) -> None:
    """Raises UsageError if a GPU (name, driver, compute capability) is too old for the plugin."""
    needs = PLUGINS[plugin]
    for name, driver, capability in gpus:
        if driver < needs.driver or capability < needs.capability:
            older = PLUGINS["jax_cuda12_plugin"]
            fits = driver >= older.driver and capability >= older.capability
            advice = "pip install 'shardformer[cuda12]'" if fits else f"install a driver from {older.driver} on"
            raise UsageError(
                f"{name} has driver {driver:g} and compute capability {capability:g}; {plugin} needs driver "
                f"{needs.driver} and compute capability {needs.capability:g}: {advice}, or set JAX_PLATFORMS=cpu"
            )


def _may_use_gpus() -> bool:
    asked = os.environ.get("JAX_PLATFORMS", "")
    return not asked or bool({"cuda", "gpu"} & set(asked.split(",")))


def _list_gpus() -> list[tuple[str, float, float]]:
    """Returns (name, major and minor version of the driver, compute capability) of each GPU."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ["nvidia-smi", "--query-gpu=name,driver_version,compute_cap", "--format=csv,noheader"]
    result = subprocess.run(query, capture_output=True, text=True, check=False)
    rows = [line.split(", ") for line in result.stdout.splitlines()] if not result.returncode else []
    return [(name, float(".".join(driver.split(".")[:2])), float(capability)) for name, driver, capability in rows]
