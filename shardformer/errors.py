"""The two types of failure of a command, each with an exit status, and short texts for their messages."""

import contextlib
from collections.abc import Iterator


class UsageError(Exception):
    """An invalid command or configuration; nothing was changed. Exit status 2."""


class RunError(Exception):
    """A failure of the run, such as a damaged file or a non-finite loss. Exit status 1."""


@contextlib.contextmanager
def forbid_exit(name: str) -> Iterator[None]:
    """Raises RunError if a user's code in the block calls sys.exit: the command would end early with its status."""
    try:
        yield
    except SystemExit as error:
        raise RunError(f"{name} calls sys.exit({error.code!r:.80}); raise an exception or return instead") from None


def describe_error(error: Exception) -> str:
    """Returns a short text of any error: a damaged pickle raises nearly every type, with messages of any length."""
    return f"{error!s:.300}" or type(error).__name__


def describe_value(value) -> str:
    """Describes a value of an untrusted file for a message: the text of a nested value could be exponentially long."""
    if type(value) is str:
        return value[:80]
    return str(value) if type(value) is int and value.bit_length() < 64 else f"a {type(value).__name__}"
