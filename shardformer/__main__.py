"""`python -m shardformer`: parses and runs a command; turns a failure into one line and an exit status."""

import contextlib
import errno
import itertools
import os
import platform
import re
import resource
import sys
from collections.abc import Callable

import shardformer
from shardformer import jax_releases
from shardformer.cli.arguments import check_keys
from shardformer.cli.commands import COMMANDS, Command, load
from shardformer.cli.interrupts import leave, leaving_at_once
from shardformer.config.parsing import shorten, suggest_closest
from shardformer.devices.host import restart_with_huge_pages
from shardformer.errors import RunError, UsageError
from shardformer.files import expand_home
from shardformer.logs import command_start, streams
from shardformer.tables import escape, format_bytes

ADDRESS_SPACE = 6_000_000_000
LONGEST_LINE = 1500  # characters of one line of a message


def main(arguments: list[str] | None = None) -> int:
    """Runs a command and returns its exit status."""
    argv = sys.argv[1:] if arguments is None else arguments
    if arguments is None:
        command_start.note_start()
    streams.open_closed_streams()
    _print_any_character()
    try:
        status = _run(argv)
        sys.stdout.flush()  # a full disk is reported here; at Python's exit it would change the status
        return status
    except UsageError as error:
        status, message = 2, f"error: {error}"
    except ModuleNotFoundError as error:
        status = 2
        message = f"error: {error.name} is not installed for {sys.executable}; try: source .venv/bin/activate"
    except BrokenPipeError:  # the reader of the output has closed it
        _drop_unwritten_output()
        return 1
    except RunError as error:
        status, message = 1, f"failed: {error}"
    except OSError as error:
        status, message = 1, f"failed: {error}"
        if error.errno == errno.ENAMETOOLONG:
            status, message = 2, f"error: {shorten(error.filename)} is too long for a name"
    except KeyboardInterrupt:
        leave()
    except (MemoryError, RuntimeError) as error:
        if not _is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        status, message = 1, f"failed: out of memory ({reason}); a smaller batch or seq, remat=full or more mp may help"
    with contextlib.suppress(OSError):
        print(f"shardformer: {_escape(message)}", file=sys.stderr)
    _drop_unwritten_output()
    return status


def _escape(message: str) -> str:
    """Escapes control characters and shortens long lines, as names of strangers may be part of a message."""
    # Lines that begin with "  - " are a list of alternatives, written by this package.
    lines = re.split(r"\n(?=  - )", message)
    lines = [escape(line) for line in lines]
    longest = LONGEST_LINE
    return "\n".join(line if len(line) <= longest else f"{line[:longest]}... ({len(line):,} in all)" for line in lines)


def _drop_unwritten_output() -> None:
    """Discards output that cannot be written, which would fail a second time at exit and change the status."""
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        try:
            stream.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), descriptor)


def _run(arguments: list[str]) -> int:
    if sys.flags.optimize > 1:
        raise UsageError("python -OO removes docstrings, which Haiku and --help read; run python, or python -O")
    if arguments[:1] == ["help"] and arguments[1:] and not arguments[1].startswith("-"):
        _check_command(arguments[1])
        arguments = [arguments[1], "--help"]
    asked = set(_known_arguments(arguments))
    if not arguments or arguments[0] not in COMMANDS:
        if arguments and arguments[0] != "help" and not {"-h", "--help", "--version"} & asked:
            _check_command(arguments[0])
        from shardformer.cli import help  # not imported by a command that runs

        print(_versions() if "--version" in asked else help.format_overview())
        return 0 if arguments else 2
    if {"-h", "--help"} & asked:
        from shardformer.cli import help

        print(help.format_command(arguments[0]))
        return 0
    is_script = arguments[0] == "legacy"  # which gets its arguments unchanged
    rest = arguments[1:] if is_script else [_expand_home(word) for word in arguments[1:]]
    _check_arguments(COMMANDS[arguments[0]], rest)
    restart_with_huge_pages(arguments)
    jax_releases.check()
    _check_address_space()
    return _load(arguments[0])(rest) or 0


def _check_arguments(command: Command, arguments: list[str]) -> None:
    """Rejects what can be rejected at once: the import of JAX takes 2 s."""
    command.check_arguments(arguments)
    if command.options:
        check_keys(arguments, map(load, command.options + command.unlisted))


def _check_command(name: str) -> None:
    if name not in COMMANDS:
        listed = f"; the commands are {', '.join(COMMANDS)} (see --help)"
        raise UsageError(f"unknown command {shorten(name)}{suggest_closest(name, COMMANDS) or listed}")


def _expand_home(word: str) -> str:
    """Expands a leading ~, which shells leave in quotes and bash after --resume=."""
    option = "--resume=" if word.startswith("--resume=") else ""
    return option + expand_home(word.removeprefix(option))


def _is_out_of_memory(error: Exception) -> bool:
    """Returns True for a MemoryError and for the RuntimeErrors of a full device or a failed thread start."""
    return isinstance(error, MemoryError) or any(
        phrase in str(error) for phrase in ("RESOURCE_EXHAUSTED", "can't start new thread")
    )


def _check_address_space() -> None:
    """Rejects a tight `ulimit -v`, under which XLA's C++ aborts the process."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY and limit < ADDRESS_SPACE:
        raise UsageError(
            f"ulimit -v allows {format_bytes(limit)} of address space, and JAX and TensorFlow reserve "
            f"{format_bytes(ADDRESS_SPACE)}, of which they use little; set ulimit -v unlimited"
        )


def _versions() -> str:
    """Returns the versions, for a bug report, and known faults, without importing the packages."""
    packages = [
        f"{package} {jax_releases.find_version(package) or 'is not installed'}"
        for package in ("jax", "jaxlib", "dm-haiku", "optax")
    ]
    versions = f"shardformer {shardformer.__version__} ({', '.join(packages)}, Python {platform.python_version()})"
    return "\n".join(filter(None, (versions, jax_releases.describe_faults())))


def _print_any_character() -> None:
    """Makes standard output and error escape characters outside their encoding instead of raising."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _load(command: str) -> Callable[[list[str]], int | None]:
    """Imports a command's function. Ctrl-C ends the process meanwhile, as JAX's callbacks would swallow it."""
    with leaving_at_once():
        return load(COMMANDS[command].function)


def _known_arguments(arguments: list[str]) -> list[str]:
    """Returns the arguments of shardformer; those after the name of a legacy script are the script's, --help too."""
    if arguments[:1] != ["legacy"]:
        return arguments
    return list(itertools.takewhile(lambda word: word.startswith("-"), arguments[1:]))


if __name__ == "__main__":
    sys.exit(main())
