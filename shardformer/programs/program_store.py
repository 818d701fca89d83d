"""The folder of the compiled programs of several processes. Every process has its own file of each program.

A file is executable code: whoever can write the folder can run code in every process. So it is never inside a run,
which may have been copied from elsewhere. A folder on a disk is used only if it belongs to this user, and others
cannot write in it.
"""

import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import jax
from jax.experimental import serialize_executable

from shardformer.files import make_folder, replacing
from shardformer.programs.old_programs import delete_unused, note_use
from shardformer.programs.program_key import make_key
from shardformer.storage import BucketPath

Gather = Callable[[str], list[str]]  # returns the texts of all processes in order
_TOKEN_BYTES, _DIGEST_BYTES = 16, 32


class _Kept(NamedTuple):
    """A program that was read, and the token of the start that compiled it on all processes."""

    program: jax.stages.Compiled
    token: str


class ProgramStore:
    """Compiled programs in a folder on a disk or in a bucket; `compiled` counts those that were not found there."""

    def __init__(self, folder: Path | BucketPath, gather: Gather):
        self.folder, self._gather = folder, gather
        danger = "" if isinstance(folder, BucketPath) else _find_danger(folder)
        if danger:
            say_not_kept(danger)
        # Without a folder the processes still agree: each must ask as often as the others.
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
        kept = self._load(path, lowered, devices)
        tokens = agree(kept.token if kept else "")
        if kept and set(tokens) == {kept.token}:
            return kept.program
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
            _say(f"a kept program cannot be read and is compiled again: {path} ({error.strerror})")
            return None
        digest, token, payload = _split(content)
        if hashlib.sha256(token + payload).digest() != digest:
            _say(f"a kept program is damaged and is compiled again: {path}")
            return None
        try:
            program = serialize_executable.deserialize_and_load(
                payload, lowered.in_tree, lowered.out_tree, execution_devices=devices
            )
        except Exception as error:  # any kind, from the backend
            _say(f"a kept program cannot be loaded and is compiled again: {path} ({_first_line(error)})")
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
            _write(path, hashlib.sha256(content).digest() + content)
            if not self._is_tidied and jax.process_index() == 0:
                self._is_tidied = True
                delete_unused(self.folder)
        except Exception as error:  # any kind: a program with a callback cannot be pickled
            self._is_written = False
            say_not_kept(f"{path}: {_first_line(error)}")


def _find_danger(folder: Path) -> str:
    """Returns why programs in a folder on a disk may come from another user; an empty text if they cannot."""
    try:
        found = folder.stat()
    except OSError:  # it is made with the first program
        return ""
    if found.st_uid != os.getuid():
        return f"{folder} belongs to another user, whose programs would run here"
    if found.st_mode & stat.S_IWOTH:
        return f"every user can write in {folder}, and its programs would run here"
    return ""


def _name_file(lowered: jax.stages.Lowered, devices: Sequence[jax.Device], options) -> str:
    text = lowered.as_text()
    name = text.partition("@")[2].partition(" ")[0]  # the text begins with: module @jit_update
    return f"{name}-{make_key(text, devices, options)}-{jax.process_index()}-of-{jax.process_count()}"


def _split(content: bytes) -> tuple[bytes, bytes, bytes]:
    """Returns the digest, the token and the payload of a file."""
    start = _DIGEST_BYTES + _TOKEN_BYTES
    return content[:_DIGEST_BYTES], content[_DIGEST_BYTES:start], content[start:]


def _write(path: Path | BucketPath, content: bytes) -> None:
    if isinstance(path, BucketPath):
        path.write_bytes(content)
        return
    if path.parent in make_folder(path.parent):
        path.parent.chmod(stat.S_IRWXU)
    with replacing(path) as temporary:
        temporary.write_bytes(content)


def say_not_kept(why: str) -> None:
    """Prints why programs are not kept, and what the user can do."""
    _say(
        f"compiled programs are not kept: {why}; program_cache=FOLDER keeps them elsewhere, "
        "program_cache=none keeps none"
    )


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:300]
