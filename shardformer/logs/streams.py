"""Standard output and error that cannot end a run, even if a pipe closes, a disk is full or a terminal disconnects."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any, TextIO, cast


class LastingStream:
    """A text stream that discards its output once a write to its file fails."""

    def __init__(self, stream: TextIO):
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._discard_output()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._discard_output()

    def _discard_output(self) -> None:
        # The descriptor is replaced, so that the flush of Python's buffers at exit does not fail either.
        with contextlib.suppress(OSError):
            discarding = os.open(os.devnull, os.O_WRONLY)
            os.dup2(discarding, self._stream.fileno())
            os.close(discarding)


def open_closed_streams() -> None:
    """Opens /dev/null for each closed standard stream; otherwise the next opened file would take its descriptor."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free descriptor, which is this one
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


@contextlib.contextmanager
def lasting_output() -> Iterator[None]:
    """Makes printing within the block unable to fail."""
    open_closed_streams()
    out, error = (cast(TextIO, LastingStream(stream)) for stream in (sys.stdout, sys.stderr))
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(error):
        yield


def write_to_descriptor(descriptor: int, text: str) -> None:
    """Writes text for a signal handler, without Python's buffers, which the signal may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
