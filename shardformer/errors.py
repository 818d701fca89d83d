"""The two ways a command can end badly, as its exit status tells them apart."""


class UsageError(Exception):
    """The command or the configuration is wrong: nothing was touched. Exit status 2."""


class RunError(Exception):
    """The run itself failed: a damaged file, a loss that is not a number. Exit status 1."""
