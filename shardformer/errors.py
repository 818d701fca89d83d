"""The two ways in which a command fails; the exit status tells them apart."""


class UsageError(Exception):
    """The command or the configuration is wrong: nothing was touched. Exit status 2."""


class RunError(Exception):
    """The run itself failed: a damaged file, a non-finite loss. Exit status 1."""
