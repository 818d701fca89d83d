"""Two or more processes that train as one: they join, agree on failures, stop at the same step, and end together.

When processes join, JAX installs its handler of SIGTERM in C, for its preemption service. Python would no longer
receive the signal: training could not answer it at once, and other commands could not be terminated.
"""

import contextlib
import ctypes
import functools
import hashlib
import math
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, TypeVar

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from shardformer.config import Config
from shardformer.config.parsing import shorten
from shardformer.config.run_keys import is_address
from shardformer.devices import clusters, programs
from shardformer.devices.clusters import Membership
from shardformer.errors import RunError, UsageError

if TYPE_CHECKING:
    from shardformer.devices.rendezvous import Watch

JAX_HEARTBEAT_DELAY = 30  # seconds after ours, because JAX's heartbeat ends a process in a stack trace
_watch: "Watch | None" = None  # of two or more processes

T = TypeVar("T")


def first_message_from_any_process(text: str) -> str:
    """Returns this process's text; if it is empty, the first text of another process, with its number."""
    messages = (f"process {process}: {message}" for process, message in enumerate(gather_texts(text)) if message)
    return text or next(messages, "")


def succeed_or_fail_together(act: Callable[[], T]) -> T:
    """Returns the result of `act`; a failure on one process is raised on all, or the others would wait forever."""
    result: list[T] = []
    local_error: RunError | UsageError | None = None
    try:
        result.append(act())
    except (RunError, UsageError) as error:
        local_error = error
    except OSError as error:
        local_error = RunError(str(error) or type(error).__name__)
    local_kind = UsageError if isinstance(local_error, UsageError) else RunError  # whatever class of these it is
    failures = gather_texts(f"{local_kind.__name__}:{local_error}" if local_error else "")
    for process, failure in enumerate(failures):
        if failure:
            kind, _, message = failure.partition(":")
            raise local_error or (UsageError if kind == UsageError.__name__ else RunError)(
                f"process {process}: {message}"
            )
    return result[0]


def run_on_first_process(act: Callable[[], object]) -> None:
    """Runs `act` in process 0 only; the rest wait for it, and its failure is raised on all."""
    succeed_or_fail_together(lambda: act() if jax.process_index() == 0 else None)


def text_of_first_process(text: str) -> str:
    return gather_texts(text)[0]


def array_of_first_process(values: np.ndarray) -> np.ndarray:
    """Returns the first process's array, bitwise; every process gives one of the same shape and dtype."""
    if jax.process_count() == 1:
        return values
    row = np.frombuffer(np.ascontiguousarray(values).tobytes(), np.uint8)
    return np.frombuffer(gather_rows(row)[0].tobytes(), values.dtype).reshape(values.shape)


def gather_texts(text: str) -> list[str]:
    """Returns the strings of all processes in order; with two or more processes each is cut to 2 kB."""
    if jax.process_count() == 1:
        return [text]
    padded = np.zeros(2048, np.uint8)
    text = text[: padded.size]
    while len(encoded := text.encode(errors="surrogateescape")) > padded.size:  # a path need not be UTF-8
        text = text[:-1]  # a cut inside a character would not be UTF-8
    padded[: len(encoded)] = np.frombuffer(encoded, np.uint8)
    return [bytes(row).rstrip(b"\0").decode(errors="surrogateescape") for row in gather_rows(padded)]


def gather_arrays(tree):
    """Returns full arrays on the host, on every process."""
    if jax.process_count() == 1:
        return jax.tree.map(np.asarray, tree)
    from jax.experimental import multihost_utils  # not imported on one machine

    return multihost_utils.process_allgather(tree, tiled=True)


def gather_rows(row: np.ndarray) -> np.ndarray:
    """Returns the rows of all processes in order, like JAX's process_allgather, by a program that is cached."""
    devices = sorted(jax.devices(), key=lambda device: (device.process_index, device.id))
    mesh = Mesh(np.array(devices).reshape(jax.process_count(), -1), ("process", "device"))
    rows = jax.make_array_from_process_local_data(NamedSharding(mesh, P("process")), row[None])
    return np.asarray(_replicate(mesh)(rows).addressable_data(0))


@functools.cache
def _replicate(mesh: Mesh):
    """Returns the program that gives every device all rows."""

    def replicate_rows(rows: jax.Array) -> jax.Array:
        return rows

    return programs.jit(replicate_rows, is_agreed=False, out_shardings=NamedSharding(mesh, P()))


@contextlib.contextmanager
def ending_all_on_failure(raised_on_all: tuple[type[Exception], ...] = (RunError, UsageError)) -> Iterator[None]:
    """Ends this process at once if only it fails, as an orderly end would wait for the other processes.

    raised_on_all: errors that every process raises; these are passed on.
    """
    try:
        yield
    except raised_on_all:
        raise
    except Exception as error:
        if not jax.distributed.is_initialized() or jax.process_count() == 1:
            raise
        from shardformer.devices.rendezvous import end_process

        message, advice = str(error)[:500] or type(error).__name__, ""
        if not isinstance(error, (RunError, UsageError, OSError)):
            if _watch is not None and _watch.ending.wait(2):
                time.sleep(60)  # another process has died; the watch prints that and ends this process
            traceback.print_exc()
            advice = ". If another process has died, what it printed says why"
        here = f"process {jax.process_index()} of {jax.process_count()}"
        end_process(f"{here}: {message}{advice}; start all of them again (to train: train --resume)")


def check_same_on_all_processes(what: str, value: str) -> None:
    """Raises RunError if a value differs: the processes would wait for one another forever, or train nonsense."""
    digest = hashlib.sha256(value.encode(errors="surrogateescape")).hexdigest()
    if len(set(gather_texts(digest))) > 1:
        raise RunError(f"{what} differs between the {jax.process_count()} processes; give all of them the same")


def check_same_software() -> None:
    """Raises RunError if a process has other code or another JAX: JAX alone may have joined the processes."""
    if jax.process_count() == 1:
        return
    from shardformer.devices.rendezvous import describe_difference, describe_software

    first, *rest = gather_texts(describe_software())
    for process, software in enumerate(rest, start=1):
        if software != first:
            raise RunError(describe_difference(0, first, process, software))


def join_processes(config: Config) -> None:
    """Starts jax.distributed if there are two or more processes, named by keys or by a scheduler."""
    if jax.distributed.is_initialized():
        return
    with keeping_sigterm():
        if membership := find_membership(config):
            _join(config, membership)
        elif clusters.is_kubernetes_job():
            _join_kubernetes_job(config)


def _join(config: Config, membership: Membership) -> None:
    from shardformer.devices import rendezvous  # not imported for one process

    global _watch

    address, count, index, devices, source = membership
    links = rendezvous.connect(address, count, index, config.processes.start_timeout, source)
    # Before JAX joins them: it waits for a process that has died since, and then ends in a stack trace.
    _watch = rendezvous.Watch(links, count, config.processes.silence)
    try:
        jax.distributed.initialize(
            address, count, index, devices,
            cluster_detection_method="deactivate",  # it would leave each process one GPU
            initialization_timeout=config.processes.start_timeout,
            heartbeat_timeout_seconds=math.ceil(config.processes.silence) + JAX_HEARTBEAT_DELAY,
        )  # fmt: skip
    except RuntimeError as error:
        raise RunError(f"jax.distributed could not start at {address}: {_first_line(error)}") from None


def _join_kubernetes_job(config: Config) -> None:
    """Joins the other pods, which JAX finds by the Kubernetes API."""
    try:
        jax.distributed.initialize(
            initialization_timeout=config.processes.start_timeout,
            heartbeat_timeout_seconds=math.ceil(config.processes.silence),
        )
    except ValueError:
        raise UsageError(
            "this pod is one of an indexed Kubernetes job; pip install 'jax[k8s]', with which JAX finds the others, or "
            "give coordinator=HOST:PORT processes=N process_id=$JOB_COMPLETION_INDEX"
        ) from None
    except (OSError, RuntimeError) as error:
        raise RunError(
            f"jax.distributed could not start in this Kubernetes job: {_first_line(error)}; all of its pods must start "
            f"within {config.processes.start_timeout} s (start_timeout)"
        ) from None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def find_membership(config: Config) -> Membership | None:
    """Returns this process's membership by the keys, by JAX's variables, or by a scheduler."""
    if config.processes.coordinator:
        return Membership(config.processes.coordinator, config.processes.count, config.processes.process_id)
    names = ("JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
    address, number, process = (os.environ.get(name, "") for name in names)
    if not address:
        return clusters.find_membership(os.environ)
    if not is_address(address):
        raise UsageError(f"{names[0]} takes HOST:PORT with a port from 1 to 65535, got {shorten(address)}")
    if not (number.isdecimal() and process.isdecimal() and int(process) < int(number)):
        raise UsageError(
            f"{names[0]}={address} needs {names[1]} and {names[2]}, from 0 to one less, as well; "
            f"got {number!r} and {process!r}"
        )
    return Membership(address, int(number), int(process))


_notify_service: Callable[[int], None] | None = None  # JAX's handler


@contextlib.contextmanager
def keeping_sigterm() -> Iterator[None]:
    """Lets JAX join the processes within the block; after it SIGTERM has the handler that it had before."""
    global _notify_service
    before = signal.getsignal(signal.SIGTERM)
    yield
    in_main_thread = threading.current_thread() is threading.main_thread()
    if not jax.distributed.is_initialized() or before is None or not in_main_thread:
        return  # nothing was taken over, or Python cannot restore the handler
    exchange = ctypes.CDLL(None).signal  # the only access to JAX's handler: Python knows the handlers that it has set
    exchange.restype, exchange.argtypes = ctypes.c_void_p, (ctypes.c_int, ctypes.c_void_p)
    address = exchange(signal.SIGTERM, None)
    signal.signal(signal.SIGTERM, before)
    if address:
        _notify_service = ctypes.CFUNCTYPE(None, ctypes.c_int)(address)


def stop_all_processes() -> None:
    """Informs the service, as SIGTERM would: all processes then agree on a step to stop at."""
    if _notify_service:
        _notify_service(signal.SIGTERM)
    else:
        signal.raise_signal(signal.SIGTERM)
