"""The two types of failure of a command; each has an exit status."""


class UsageError(Exception):
    """An invalid command or configuration; nothing was changed. Exit status 2."""


class RunError(Exception):
    """A failure of the run, such as a damaged file or a non-finite loss. Exit status 1."""
