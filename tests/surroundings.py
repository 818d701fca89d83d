"""Surroundings and faults that tests of two or more packages simulate, each patched in one function."""

import collections
import contextlib
import functools
import inspect
import os
import shutil
from collections.abc import Iterator

import jax
from obstore.store import MemoryStore

from shardformer.checkpoint import checksums, stores
from shardformer.checkpoint.bucket_store import BucketStore
from shardformer.data import packed_files, text_cuts
from shardformer.devices import processes, rendezvous
from shardformer.kernels import linear
from shardformer.storage import bucket, local_copy, requests


def simulate_processes(monkeypatch, count: int, index: int = 0) -> None:
    """Makes this process look like one of `count` processes; nothing answers for the others."""
    for name, value in {"process_count": count, "process_index": index}.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)


def simulate_failing_processes(monkeypatch, end) -> None:
    """Does the same for two processes that end together: `end` gets the reason instead of the system."""
    simulate_processes(monkeypatch, 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "end_process", end)


def note_exits(monkeypatch, note) -> None:
    """Calls `note(status)` where the process would end at once."""
    monkeypatch.setattr(os, "_exit", note)


def answer_for_processes(monkeypatch, answer) -> None:
    """Makes `answer(text)` the strings of all processes if this one sends its text to the others."""
    monkeypatch.setattr(processes, "gather_texts", answer)


def note_texts(monkeypatch) -> list[str]:
    """Returns a list that gets each text that this process sends to all."""
    sent: list[str] = []
    before_call(monkeypatch, processes, "gather_texts", sent.append)
    return sent


def before_call(monkeypatch, owner, name: str, act) -> None:
    """Calls `act` with the arguments of each call of a function, before it; an error of `act` is the function's.

    The function itself stays: a test notes, delays or interrupts its calls, and replaces no result.
    """
    function = getattr(owner, name)

    def call(*arguments, **named):
        act(*arguments, **named)
        return function(*arguments, **named)

    is_static = isinstance(inspect.getattr_static(owner, name), staticmethod)
    monkeypatch.setattr(owner, name, staticmethod(call) if is_static else call)


def let_fail(monkeypatch, owner, name: str, error: BaseException) -> None:
    """Lets each call of a function fail with an error: that of a full disk, say, or of Ctrl-C."""

    def fail(*_, **__):
        raise error

    before_call(monkeypatch, owner, name, fail)


def hide_home(monkeypatch) -> None:
    """Hides the home folder, as without HOME and without a passwd entry."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def before_sync(monkeypatch, act) -> None:
    """Calls `act(descriptor)` before each `os.fsync`; an error that it raises is the system's."""
    before_call(monkeypatch, os, "fsync", act)


def simulate_devices(monkeypatch, devices: list) -> None:
    """Makes these the devices of all processes."""
    monkeypatch.setattr(jax, "devices", lambda *_: devices)


def simulate_free_space(monkeypatch, free: int) -> None:
    """Makes every disk have so many free bytes."""
    usage = shutil.disk_usage("/")._replace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)


def open_buckets(monkeypatch, open_bucket) -> None:
    """Lets `open_bucket(scheme, name)` return the store of each bucket."""
    monkeypatch.setattr(bucket, "open_bucket", open_bucket)


def open_memory_buckets(monkeypatch) -> None:
    """Lets every bucket be one in memory, empty at first."""
    open_buckets(monkeypatch, functools.cache(lambda scheme, name: MemoryStore()))


def change_patience(monkeypatch, **seconds) -> None:
    """Changes how long requests to buckets are repeated."""
    monkeypatch.setattr(requests, "PATIENCE", requests.PATIENCE._replace(**seconds))


def change_blocks(monkeypatch, size: int) -> None:
    """Changes how many bytes of an array have one checksum."""
    monkeypatch.setattr(checksums, "BLOCK", size)


def change_pieces(monkeypatch, elements: int, lanes: int = linear.LANES) -> None:
    """Changes the size of the pieces of wide gradients, and of a TPU's tile."""
    monkeypatch.setattr(linear, "PIECE_ELEMENTS", elements)
    monkeypatch.setattr(linear, "LANES", lanes)


def change_copies(monkeypatch, **sizes) -> None:
    """Changes the sizes in which objects of buckets are copied, or how many are requested at once."""
    monkeypatch.setattr(local_copy, "REQUESTS", local_copy.REQUESTS._replace(**sizes))


def change_text_limits(monkeypatch, **limits) -> None:
    """Changes the sizes in which texts are read."""
    monkeypatch.setattr(text_cuts, "LIMITS", text_cuts.LIMITS._replace(**limits))


def change_expansion(monkeypatch, **limits) -> None:
    """Changes how much a packed file may grow."""
    monkeypatch.setattr(packed_files, "EXPANSION", packed_files.EXPANSION._replace(**limits))


def change_bucket_store(monkeypatch, **sizes) -> None:
    """Changes the sizes of the parts of checkpoints in buckets, or how many are sent or read at once."""
    monkeypatch.setattr(stores, "_BUCKET", BucketStore(**sizes))


@contextlib.contextmanager
def counting_compilations() -> Iterator[collections.Counter]:
    """Counts XLA's compilations by the name of the function."""
    counts: collections.Counter = collections.Counter()

    def count(event, _, fun_name="", **__):
        if event.endswith("backend_compile_duration"):
            counts[fun_name] += 1

    jax.monitoring.register_event_duration_secs_listener(count)
    try:
        yield counts
    finally:
        jax.monitoring.unregister_event_duration_listener(count)
