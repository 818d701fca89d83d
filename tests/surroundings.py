"""Surroundings and faults that tests of two or more packages simulate, each patched in one function."""

import functools
import os

import jax
from obstore.store import MemoryStore

from shardformer.checkpoint import stores
from shardformer.checkpoint.bucket_store import BucketStore
from shardformer.data import text_files
from shardformer.devices import processes, rendezvous
from shardformer.storage import bucket, requests


def simulate_processes(monkeypatch, count: int, index: int = 0) -> None:
    """Makes this process look like one of `count` processes; nothing answers for the others."""
    for name, value in {"process_count": count, "process_index": index}.items():
        monkeypatch.setattr(jax, name, lambda value=value: value)


def simulate_failing_processes(monkeypatch, end) -> None:
    """Does the same for two processes that end together: `end` gets the reason instead of the system."""
    simulate_processes(monkeypatch, 2)
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(rendezvous, "end_process", end)


def note_documents(monkeypatch) -> list[str]:
    """Returns a list that gets each document that this process sends to all."""
    sent: list[str] = []
    monkeypatch.setattr(processes, "gather_documents", lambda document: sent.append(document) or [document])
    return sent


def hide_home(monkeypatch) -> None:
    """Hides the home folder, as without HOME and without a passwd entry."""
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)


def before_sync(monkeypatch, act) -> None:
    """Calls `act(descriptor)` before each `os.fsync`; an error that it raises is the system's."""
    fsync = os.fsync

    def sync(descriptor):
        act(descriptor)
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", sync)


def open_memory_buckets(monkeypatch) -> None:
    """Lets every bucket be one in memory, empty at first."""
    monkeypatch.setattr(bucket, "open_bucket", functools.cache(lambda scheme, name: MemoryStore()))


def change_patience(monkeypatch, **seconds) -> None:
    """Changes how long requests to buckets are repeated."""
    monkeypatch.setattr(requests, "PATIENCE", requests.PATIENCE._replace(**seconds))


def change_text_limits(monkeypatch, **limits) -> None:
    """Changes the sizes in which texts are read."""
    monkeypatch.setattr(text_files, "LIMITS", text_files.LIMITS._replace(**limits))


def change_bucket_store(monkeypatch, **sizes) -> None:
    """Changes the sizes of the parts of checkpoints in buckets, or how many are sent or read at once."""
    monkeypatch.setattr(stores, "_BUCKET", BucketStore(**sizes))
