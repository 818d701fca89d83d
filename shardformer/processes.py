"""How several processes train as one: how they join, agree on what failed, and end together."""

import contextlib
import hashlib
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from shardformer import peers
from shardformer.checks import is_address
from shardformer.config import Config
from shardformer.errors import RunError, UsageError
from shardformer.parsing import shorten

JAX_IS_SLOWER = 30  # seconds by which JAX's own heartbeat, which ends in a stack trace, comes after ours
_watch: peers.Watch | None = None

T = TypeVar("T")


def first_message_from_any_process(text: str) -> str:
    """This process's own text if it has one, else the first other's, with the number of that process."""
    if jax.process_count() == 1:
        return text
    others = (f"process {process}: {words}" for process, words in enumerate(_gather_texts(text)) if words)
    return text or next(others, "")


def succeed_or_fail_together(act: Callable[[], T]) -> T:
    """Returns what `act` returns; a failure on one process is raised on all, or the others would wait forever."""
    found, own = None, None
    try:
        found = act()
    except (RunError, UsageError) as error:
        own = error
    except OSError as error:
        own = RunError(str(error))
    if told := first_message_from_any_process(str(own) if own else ""):
        usage = first_message_from_any_process("usage" if isinstance(own, UsageError) else "")
        raise own or (UsageError if usage else RunError)(told)
    return found


def run_on_first_process(act: Callable[[], object]) -> None:
    """Runs `act` in process 0 alone; the others wait for it, and its failure is raised on all."""
    succeed_or_fail_together(lambda: act() if jax.process_index() == 0 else None)


def text_of_first_process(text: str) -> str:
    return _gather_texts(text)[0] if jax.process_count() > 1 else text


def _gather_texts(text: str) -> list[str]:
    """Every process's text, in their order, each cut to 2 kB."""
    padded = np.zeros(2048, np.uint8)
    encoded = np.frombuffer(text.encode()[: padded.size], np.uint8)
    padded[: encoded.size] = encoded
    return [bytes(row).rstrip(b"\0").decode(errors="ignore") for row in multihost_utils.process_allgather(padded)]


@contextlib.contextmanager
def ending_all_on_failure() -> Iterator[None]:
    """Where one process of several fails alone, it ends at once: an orderly end would wait for the others' end.

    RunErrors and UsageErrors are raised on all of them; on those they end together.
    """
    try:
        yield
    except (RunError, UsageError):
        raise
    except Exception as error:
        if jax.process_count() == 1:
            raise
        if _watch is not None and _watch.ending.wait(2):
            time.sleep(60)  # this failure is the other's death, which the watch is about to name before it ends us
        traceback.print_exc()
        here = f"process {jax.process_index()} of {jax.process_count()}"
        words = str(error)[:500] or type(error).__name__
        print(
            f"shardformer: failed: {here}: {words}. If another process has died, what it printed "
            "says why; start all of them again with train --resume",
            file=sys.stderr,
        )
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(1)


def check_same_on_all_processes(what: str, value: str) -> None:
    """Processes that start out differently would wait for one another forever, or train nonsense."""
    if jax.process_count() > 1:
        digest = np.frombuffer(hashlib.sha256(value.encode()).digest(), np.uint8)
        digests = multihost_utils.process_allgather(digest)
        if (digests != digests[0]).any():
            raise RunError(f"{what} differs between the {jax.process_count()} processes; give all of them the same")


def join_processes(config: Config) -> None:
    """Starts jax.distributed where there are several processes: named by keys, by the environment, or by a TPU pod."""
    if jax.distributed.is_initialized():
        return
    named = find_named_processes(config)
    if named:
        _join_named(config, *named)
    elif _on_tpu_vm():
        _join_tpu_pod(config)


def _join_named(config: Config, address: str, count: int, index: int) -> None:
    global _watch
    say = lambda line: print(line, file=sys.stderr, flush=True)
    links = peers.connect(address, count, index, config.start_timeout, say)
    try:
        jax.distributed.initialize(
            address, count, index,
            initialization_timeout=config.start_timeout,
            heartbeat_timeout_seconds=config.heartbeat + JAX_IS_SLOWER,
        )  # fmt: skip
    except RuntimeError as error:
        raise RunError(f"jax.distributed could not start at {address}: {_first_line(error)}") from None
    _watch = peers.Watch(links, count, config.heartbeat)


def _join_tpu_pod(config: Config) -> None:
    timeouts = {"initialization_timeout": config.start_timeout, "heartbeat_timeout_seconds": config.heartbeat}
    try:
        jax.distributed.initialize(**timeouts)
    except ValueError:
        pass  # a TPU without a cluster around it: one process
    except OSError as error:  # of the request to the metadata server
        raise UsageError(
            f"this machine has a TPU, but its metadata server does not answer ({_first_line(error)}); for a single "
            "machine set TPU_SKIP_MDS_QUERY=1, for several give coordinator=, processes= and process_id="
        ) from None
    except RuntimeError as error:
        raise RunError(
            f"jax.distributed could not start: {_first_line(error)}; start the same command on every worker within "
            f"{config.start_timeout} s (start_timeout)"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def find_named_processes(config: Config) -> tuple[str, int, int] | None:
    """(coordinator's address, number of processes, number of this one), where keys or the environment name them."""
    if config.coordinator:
        return config.coordinator, config.processes, config.process_id
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, number, process = (os.environ.get(name, "") for name in names)
    if not address:
        return None
    if not is_address(address):
        raise UsageError(f"{names[0]} takes HOST:PORT with a port from 1 to 65535, got {shorten(address)}")
    if not (number.isdecimal() and process.isdecimal() and int(process) < int(number)):
        raise UsageError(
            f"{names[0]}={address} needs {names[1]} and {names[2]}, from 0 to one less, as well; "
            f"got {number!r} and {process!r}"
        )
    return address, int(number), int(process)


def _on_tpu_vm() -> bool:
    """Without touching a device: jax.distributed must come first."""
    if (os.environ.get("JAX_PLATFORMS") or "tpu").split(",")[0] != "tpu":
        return False
    return "TPU_ACCELERATOR_TYPE" in os.environ or any(map(_is_tpu, Path("/sys/bus/pci/devices").glob("*")))


def _is_tpu(pci_device: Path) -> bool:
    """A PCI device of Google's that is neither a disk (class 01) nor a network card (02)."""
    try:
        vendor, kind = ((pci_device / name).read_text().strip() for name in ("vendor", "class"))
    except OSError:
        return False
    return vendor == "0x1ae0" and not kind.startswith(("0x01", "0x02"))
