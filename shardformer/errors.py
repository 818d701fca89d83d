"""The two types of failure of a command; each has an exit status."""

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
