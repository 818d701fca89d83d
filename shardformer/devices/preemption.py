"""JAX's preemption service, by which all processes stop at the same step, and the signal that it takes over.

When processes join, JAX installs its own handler of SIGTERM in C. Python would no longer receive the signal: training
could not answer it at once, and other commands could not be terminated.
"""

import contextlib
import ctypes
import signal
import threading
from collections.abc import Callable, Iterator

import jax

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
