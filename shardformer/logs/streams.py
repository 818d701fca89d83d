"""Standard output and error that cannot end a run: a closed pipe, a full disk, a terminal that is gone."""

import contextlib
import os
import sys


class LastingStream:
    """A text stream that writes to nowhere once its file refuses to be written."""

    def __init__(self, stream):
        self._stream = stream

    def __getattr__(self, name: str):
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            self._redirect_to_nowhere()
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            self._redirect_to_nowhere()

    def _redirect_to_nowhere(self) -> None:
        # What is buffered, and what others print there, goes nowhere as well, or Python's exit would fail.
        with contextlib.suppress(OSError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, self._stream.fileno())
            os.close(nowhere)


def open_closed_streams() -> None:
    """Puts /dev/null where standard input, output or error is closed: the next file opened would take its number."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest free number, which is this one
    for name, descriptor, mode in (("stdin", 0, "r"), ("stdout", 1, "w"), ("stderr", 2, "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(descriptor, mode, closefd=False))


@contextlib.contextmanager
def lasting_output():
    """Within the block nothing that is printed can fail."""
    open_closed_streams()
    with contextlib.redirect_stdout(LastingStream(sys.stdout)), contextlib.redirect_stderr(LastingStream(sys.stderr)):
        yield


def write_to_descriptor(descriptor: int, text: str) -> None:
    """For signal handlers: past Python's buffers, which the signal may have interrupted."""
    with contextlib.suppress(OSError):
        os.write(descriptor, text.encode())
