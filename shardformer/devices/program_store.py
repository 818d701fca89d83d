"""The folder of the compiled programs of two or more processes. Every process has a separate file of each program.

A file is executable code: whoever can write the folder can run code in every process. So it is never inside a run, nor
next to a run on a disk: both may have been copied from elsewhere. A folder on a disk is used only if it belongs to this
user, and others cannot write in it. A program in a bucket is loaded only if it was written there: its digest covers the
seal of the folder.
"""

import contextlib
import hashlib
import json
import os
import re
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jaxlib
from jax.extend import backend

from shardformer.devices.host import describe_processor
from shardformer.devices.program_folder import find_danger, make_private_folder, say_not_stored
from shardformer.files import replacing
from shardformer.messages import log
from shardformer.storage import BucketPath, bucket

try:
    from jax.experimental import serialize_executable
except ImportError:  # a later JAX: every program is compiled again
    serialize_executable = None  # type: ignore[assignment]  # of a module

Gather = Callable[[str], list[str]]  # returns the strings of all processes in order
_TOKEN_BYTES, _DIGEST_BYTES = 16, 32
SEAL = "seal"  # an object of random bytes in a folder of a bucket
DAYS = 30  # programs that no start has used for longer are deleted, or their folder would grow for ever
_PROGRAM = re.compile(r".+-[0-9a-f]{32}-\d+-of-\d+")
# Settings of JAX with these beginnings change no program, or change its text as well.
_IRRELEVANT = ("jax_compilation_cache", "jax_persistent_cache", "jax_numpy", "jax_num_cpu_devices", "jax_platforms")
_FLAGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")
_PLACE = ("id", "process_index", "device_kind", "coords", "core_on_chip", "slice_index")


class _Kept(NamedTuple):
    """A program that was read, and the token of the start that compiled it on all processes."""

    program: jax.stages.Compiled
    token: str


class ProgramStore:
    """Compiled programs in a folder on a disk or in a bucket; `compiled` counts those that the folder lacked."""

    def __init__(self, folder: Path | BucketPath, gather: Gather):
        self.folder, self._gather = folder, gather
        danger, self._seal = "", b""
        try:
            if isinstance(folder, BucketPath):
                self._seal = read_seal(folder)
            else:
                danger = find_danger(folder)
        except OSError as error:
            danger = f"{folder}: {_first_line(error)}"
        if serialize_executable is None:
            danger = "this JAX has no jax.experimental.serialize_executable"
        if danger:
            say_not_stored(danger)
        # Without a folder the processes still agree: each must ask equally often.
        self._is_read = self._is_written = not danger
        self._is_tidied = False  # after the first program of this start that is written
        self.compiled = 0

    def load_or_compile(
        self, lowered: jax.stages.Lowered, devices: Sequence[jax.Device], options=None, is_agreed: bool = True
    ) -> jax.stages.Compiled:
        """Loads a program if all processes have it from the same start; otherwise all processes compile it.

        Without `is_agreed` each process decides for itself: for the program by which they agree.
        """
        path = self.folder / _name_file(lowered, devices, options)
        agree: Gather = self._gather if is_agreed else lambda text: [text]
        stored = self._load(path, lowered, devices)
        tokens = agree(stored.token if stored else "")
        if stored and set(tokens) == {stored.token}:
            return stored.program
        self.compiled += 1
        program = lowered.compile()
        token = agree(secrets.token_hex(_TOKEN_BYTES // 2))[0]
        self._save(path, program, token)
        return program

    def _load(
        self, path: Path | BucketPath, lowered: jax.stages.Lowered, devices: Sequence[jax.Device]
    ) -> _Kept | None:
        """Returns the program in a file; None if there is none or it is damaged."""
        if not self._is_read:
            return None
        try:
            content = path.read_bytes()
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning(f"a kept program cannot be read and is compiled again: {path} ({error.strerror})")
            return None
        digest, token, payload = _split(content)
        if hashlib.sha256(self._seal + token + payload).digest() != digest:
            copied = " or was copied here" if self._seal else ""
            log.warning(f"a kept program is damaged{copied} and is compiled again: {path}")
            return None
        try:
            program = serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree, execution_devices=devices
            )
        except Exception as error:  # any kind, from the backend
            log.warning(f"a kept program cannot be loaded and is compiled again: {path} ({_first_line(error)})")
            return None
        note_use(path)
        return _Kept(program, token.decode())

    def _save(self, path: Path | BucketPath, program: jax.stages.Compiled, token: str) -> None:
        """Writes a program's file; a failure is printed once, and the run goes on."""
        if not self._is_written:
            return
        try:
            payload, *_ = serialize_executable.serialize(program)
            content = token.encode() + payload
            _write(path, hashlib.sha256(self._seal + content).digest() + content)
            if not self._is_tidied and jax.process_index() == 0:
                self._is_tidied = True
                delete_unused(self.folder)
        except Exception as error:  # any kind: a program with a callback cannot be pickled
            self._is_written = False
            say_not_stored(f"{path}: {_first_line(error)}")


def read_seal(folder: BucketPath) -> bytes:
    """Returns the seal of a folder in a bucket, and creates the object if it is missing.

    A copied folder has another seal: its path differs, or the time at which the bucket wrote the object, which nobody
    can choose.
    """
    path = folder / SEAL
    if bucket.head(path) is None:
        with contextlib.suppress(bucket.ChangedError):  # another process was first
            bucket.create(path, secrets.token_bytes(32))
    content, _ = bucket.read(path)
    if (stored := bucket.head(path)) is None:
        raise FileNotFoundError(f"{path} was deleted meanwhile")
    return f"{folder} {content.hex()} {stored.modified}".encode()


def _name_file(lowered: jax.stages.Lowered, devices: Sequence[jax.Device], options) -> str:
    text = lowered.as_text()
    name = text.partition("@")[2].partition(" ")[0]  # the text starts with: module @jit_update
    return f"{name}-{make_key(text, devices, options)}-{jax.process_index()}-of-{jax.process_count()}"


def _split(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the digest, the token and the payload of a file."""
    start = _DIGEST_BYTES + _TOKEN_BYTES
    return content[:_DIGEST_BYTES], content[_DIGEST_BYTES:start], content[start:]


def _write(path: Path | BucketPath, content: bytes) -> None:
    if isinstance(path, BucketPath):
        path.write_bytes(content)
        return
    make_private_folder(path.parent)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]


def make_key(text: str, devices: Sequence[jax.Device], options: Any = None) -> str:
    """Returns the key of a lowered program, on `devices` in the order of its mesh, with these compiler options.

    The text has no locations and no device order: programs of two orders differ only in `devices`.
    """
    order = [[str(getattr(device, name, "")) for name in _PLACE] for device in devices]
    parts = [text, order, repr(options), jax.process_index(), jax.process_count(), _describe_compiler()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def _describe_compiler() -> list:
    settings: Any = jax.config  # a type checker does not know its values
    platform = backend.get_backend()
    versions = [jax.__version__, jaxlib.__version__, platform.platform, platform.platform_version]
    flags = [os.environ.get(name, "") for name in _FLAGS]
    values = sorted((name, repr(value)) for name, value in settings.values.items() if not name.startswith(_IRRELEVANT))
    return [versions, describe_processor(), flags, values]


def note_use(path: Path | BucketPath) -> None:
    """Makes now the time of a file on a disk. An object in a bucket keeps the time at which it was written."""
    if isinstance(path, Path):
        with contextlib.suppress(OSError):
            os.utime(path)


def delete_unused(folder: Path | BucketPath) -> None:
    """Deletes the programs of all processes whose time is more than DAYS days ago; a failure is ignored."""
    oldest = time.time() - DAYS * 24 * 3600
    with contextlib.suppress(OSError):
        for name, used in _list_times(folder).items():
            if used < oldest and _PROGRAM.fullmatch(name):
                with contextlib.suppress(FileNotFoundError):  # another run deleted it first
                    (folder / name).unlink()


def _list_times(folder: Path | BucketPath) -> dict[str, float]:
    if isinstance(folder, BucketPath):
        return {name: stored.modified for name, stored in bucket.list_stored(folder).items()}
    with os.scandir(folder) as entries:
        return {entry.name: entry.stat(follow_symlinks=False).st_mtime for entry in entries}
