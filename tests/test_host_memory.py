"""What a step frees stays with the process, so that the next step does not fault it in again."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import pytest

from shardformer import host_memory

# Page faults of writing to a fresh 100 MB in another thread, as XLA's do, the fourth time.
PROGRAM = """
import ctypes, resource, threading
from shardformer import host_memory
kept = host_memory.keep_freed_memory()
libc = ctypes.CDLL(None)
libc.malloc.restype, libc.malloc.argtypes, libc.free.argtypes = ctypes.c_void_p, [ctypes.c_size_t], [ctypes.c_void_p]
faults = []
def step():
    before, size = resource.getrusage(resource.RUSAGE_SELF).ru_minflt, 100 << 20
    block = libc.malloc(size)
    ctypes.memset(block, 1, size)
    libc.free(block)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
def steps():
    for _ in range(4): step()
thread = threading.Thread(target=steps)
thread.start()
thread.join()
print(kept, faults[-1])
"""


def faults(**chosen: str) -> tuple[bool, int]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_TUNABLES"))}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], env=clean | chosen, capture_output=True, text=True, check=True
    )
    kept, count = done.stdout.split()
    return kept == "True", int(count)


def test_freed_memory_is_used_again():
    kept, count = faults()
    assert kept == hasattr(ctypes.CDLL(None), "mallopt")  # glibc's
    assert count < 100 or not kept
    kept, count = faults(MALLOC_ARENA_MAX="8")  # what a user chose stays
    assert not kept
    assert count > 1000 or huge_pages_always()


def huge_pages_always() -> bool:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.exists() and "[always]" in setting.read_text()


@pytest.mark.parametrize(("platforms", "cpu"), [("cpu", True), ("tpu,cpu", False), ("cuda", False)])
def test_accelerators_leave_the_host_alone(platforms, cpu):
    assert host_memory.cpu_computes(platforms) == cpu


def test_without_a_plugin_for_an_accelerator_the_cpu_computes(monkeypatch):
    monkeypatch.setattr(host_memory.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(host_memory.importlib.metadata, "entry_points", lambda group: [])
    assert host_memory.cpu_computes(None)
    monkeypatch.setattr(host_memory.importlib.util, "find_spec", lambda name: name == "libtpu")
    assert not host_memory.cpu_computes(None)
