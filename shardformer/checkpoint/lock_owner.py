"""The owner of the lock of a run folder, as its record names it."""

import contextlib
import json
import os
import socket
from pathlib import Path
from typing import NamedTuple

from shardformer.tables import escape

_LONGEST = 200  # characters of a text in a record


class Owner(NamedTuple):
    """A process of one boot of a machine, in one namespace of process ids; without a host, nobody."""

    host: str = ""
    process: int = 0
    boot: str = ""  # of the kernel: containers of different machines may have the same host name
    namespace: str = ""  # of process ids, which containers of one machine share, and of the ticks since the boot
    started: int = 0  # in ticks since the boot: the system reuses process ids

    def __str__(self) -> str:
        """Returns a description for a message; a record is a stranger's file, so control characters are escaped."""
        return f"process {self.process} on {escape(self.host)}"


def this_process() -> Owner:
    boot = namespace = ""
    with contextlib.suppress(OSError):  # not Linux
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
    with contextlib.suppress(OSError):  # it shifts the ticks of each process; Linux before 5.6 has none
        namespace += " " + os.readlink("/proc/self/ns/time")
    return Owner(socket.gethostname(), os.getpid(), boot, namespace, _read_start(os.getpid()))


def parse_owner(content: bytes) -> Owner:
    """Returns the owner that a record names; an empty one if the content names none."""
    try:
        record = json.loads(content)
        identifiers = {name: str(record.get(name, ""))[:_LONGEST] for name in ("boot", "namespace")}
        host, process, started = str(record["host"])[:_LONGEST], int(record["process"]), int(record.get("started", 0))
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return Owner()
    return Owner(host, process, **identifiers, started=started)


def is_known_dead(owner: Owner) -> bool:
    """Returns whether the owner was a process that this one would see, and it has ended."""
    here = this_process()
    is_visible = here.boot and here.namespace and here.started and owner[:1] + owner[2:4] == here[:1] + here[2:4]
    if not (is_visible and owner.started) or _is_hidden(owner.process):
        return False
    return _read_start(owner.process) != owner.started


def _is_hidden(process: int) -> bool:
    """Returns whether a process exists that /proc does not show, such as that of another user under hidepid=2."""
    if process < 1 or os.access(f"/proc/{process}/stat", os.R_OK):
        return False
    try:
        os.kill(process, 0)
    except PermissionError:
        return True
    except (OSError, OverflowError):
        return False
    return True


def _read_start(process: int) -> int:
    """Returns when a process started, in ticks since the boot; 0 if there is none, or only its exit status is left."""
    try:
        # The command's name, in parentheses, may have spaces.
        state, *fields = Path(f"/proc/{process}/stat").read_text(errors="replace").rpartition(")")[2].split()
        return 0 if state in "ZX" else int(fields[18])
    except (OSError, ValueError, IndexError):
        return 0
