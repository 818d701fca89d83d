"""The start of processes that train together: they find each other, and notice when one of them has died.

Every process keeps one connection to process 0, made on the coordinator's port before JAX's service takes it over.
Without it, JAX would wait silently, not name the missing process, and end in a C++ stack trace. Processes with
different code would train one model by different rules: they compare their software when they meet.
"""

import atexit
import contextlib
import errno
import functools
import hashlib
import os
import platform
import socket
import sys
import threading
import time
from collections.abc import Callable
from importlib import metadata
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NoReturn

import jax
import jaxlib

import shardformer
from shardformer.errors import RunError, UsageError
from shardformer.messages import log
from shardformer.tables import escape

HELLO = "shardformer"
ALIVE, GOODBYE, LOST, GO, REFUSED = (word.encode() for word in ("alive", "goodbye", "lost", "go", "refused"))
RETRY = 0.5  # seconds between attempts to connect
REMIND = 10  # seconds between two lines that name the missing processes
OWNER_SECONDS = 2  # in which the program on a port that is in use can answer that it is process 0


class Link:
    """A connection that carries lines of text."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.buffer = connection, b""
        self.heard, self.left = time.monotonic(), False

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # the end of the partner is noticed by `receive`
            self.connection.sendall(line + b"\n")

    def is_closed(self) -> bool:
        """Returns whether the partner has ended; does not wait."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> list[bytes]:
        """Waits for lines and returns them; raises ConnectionError if the partner has closed the connection."""
        more = self.connection.recv(4096)
        if not more:
            raise ConnectionResetError
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + more).split(b"\n")
        if len(self.buffer) > 4096:
            raise ConnectionResetError
        return lines

    def receive_one(self, seconds: float) -> bytes:
        """Returns one line; raises TimeoutError if it is not complete in time, even if a part of it came."""
        end = time.monotonic() + seconds
        try:
            while (left := end - time.monotonic()) > 0:
                self.connection.settimeout(left)
                if lines := self.receive():
                    return lines[0]
            raise TimeoutError
        finally:
            self.connection.settimeout(None)


def connect(address: str, count: int, index: int, timeout: float, source: str = "") -> dict[int, Link]:
    """Waits for all `count` processes. Returns the links to all others on process 0, elsewhere the link to process 0.

    source: the scheduler that has counted the processes, if no key did.
    """
    waiting = _Waiting(time.monotonic() + timeout, timeout, count, source)
    host, _, port = address.rpartition(":")
    if index == 0:
        return _accept_all(int(port), count, waiting)
    return {0: _connect_to_first(host.strip("[]"), int(port), count, index, waiting)}


class _Waiting:
    """A wait with a deadline, which names the missing processes."""

    def __init__(self, deadline: float, timeout: float, count: int, source: str):
        self.deadline, self.timeout, self.count = deadline, timeout, count
        how = f": {source} has {count} processes" if source else ", each with its own process_id"
        self.advice = f"start the same command on every machine{how}"
        self.next_line = time.monotonic() + 1

    def check(self, missing: list[int], where: str = "") -> None:
        """Prints the missing processes now and then; raises RunError after the deadline."""
        named = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.count}{where}"
        if time.monotonic() > self.deadline:
            raise RunError(f"{named} did not answer within {self.timeout:g} s (start_timeout); {self.advice}")
        if time.monotonic() > self.next_line:
            self.next_line = time.monotonic() + REMIND
            left = self.deadline - time.monotonic()
            log.warning(f"waiting for {named}, for at most {left:.0f} s more; {self.advice}")


def _accept_all(port: int, count: int, waiting: _Waiting) -> dict[int, Link]:
    links: dict[int, Link] = {}
    with _listen(port, count) as listener:
        listener.settimeout(RETRY)
        try:
            while missing := [index for index in range(1, count) if index not in links]:
                waiting.check(missing)
                with contextlib.suppress(TimeoutError):
                    _welcome(listener.accept()[0], count, links, waiting)
        except (RunError, UsageError) as error:
            for link in links.values():
                link.send(REFUSED + b" " + str(error).encode())
            raise
    for link in links.values():
        link.send(GO)
    return links


def _listen(port: int, count: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(_describe_owner(port, count)) from None
        raise UsageError(f"cannot listen on port {port} of coordinator=: {error.strerror}; choose another") from None


def _describe_owner(port: int, count: int) -> str:
    """Asks the program on a port that is in use whether it is also process 0 of a run; returns the error's text."""
    with contextlib.suppress(OSError):
        link = Link(socket.create_connection(("localhost", port), timeout=OWNER_SECONDS))
        link.send(f"{HELLO} 0 {count}".encode())
        word, _, reason = link.receive_one(OWNER_SECONDS).partition(b" ")
        link.connection.close()
        if word == REFUSED:
            return reason.decode(errors="replace")
    return (
        f"port {port} of coordinator= is in use on this machine, by another run or by a second process with "
        "process_id=0; choose another port, the same on all processes, or give each process its own process_id"
    )


def _welcome(connection: socket.socket, count: int, links: dict[int, Link], waiting: _Waiting) -> None:
    """Adds the process that has connected to `links`; ignores other programs.

    Raises UsageError if the processes have different code, or were started with values that contradict each other.
    """
    link = Link(connection)
    try:
        hello = link.receive_one(min(5, max(waiting.deadline - time.monotonic(), RETRY)))
        name, *fields = hello.decode().split(" ", 3)
        index, their_count = map(int, fields[:2])
        software = fields[2] if len(fields) > 2 else "an older shardformer"
    except (OSError, ValueError):
        connection.close()
        return
    if name != HELLO or not 0 <= index < max(count, their_count):
        connection.close()
    elif index == 0:  # it does not join: this run may still become complete
        reason = "two processes were started with process_id=0 and this port; give each process its own process_id"
        link.send(REFUSED + b" " + reason.encode() + b", or another run another port of coordinator=")
        log.warning(f"{reason}; the second one was rejected")
    elif their_count != count:
        reason = f"process 0 was given processes={count}, process {index} processes={their_count}; give all the same"
        link.send(REFUSED + b" " + reason.encode())
        raise UsageError(reason)
    elif software != describe_software():
        reason = describe_difference(0, describe_software(), index, software)
        link.send(REFUSED + b" " + reason.encode())
        raise UsageError(reason)
    elif index in links and not links[index].is_closed():  # a closed one has been restarted
        reason = f"two processes were started with process_id={index}; give each its own"
        link.send(REFUSED + b" " + reason.encode())
        raise UsageError(reason)
    else:
        links[index] = link


def _connect_to_first(host: str, port: int, count: int, index: int, waiting: _Waiting) -> Link:
    where = f" at {host}:{port}"
    while True:
        try:
            link = Link(socket.create_connection((host, port), timeout=5))
            break
        except socket.gaierror as error:
            where = f" at {host}:{port} (this host name cannot be found: {error.strerror})"
        except OSError:
            pass
        waiting.check([0], where)
        time.sleep(RETRY)
    link.send(f"{HELLO} {index} {count} {describe_software()}".encode())
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                word, _, reason = link.receive_one(RETRY).partition(b" ")
            except ConnectionError:
                raise RunError(f"process 0 of {count}{where} has closed the connection; see what it printed") from None
            if word == GO:
                return link
            if word == REFUSED:
                raise RunError(reason.decode(errors="replace"))
            raise RunError(f"{host}:{port} belongs to another program")
        if time.monotonic() > waiting.deadline + 10:  # process 0 knows which process is missing, and reports it first
            waiting.check([0], where)


class Watch(threading.Thread):
    """A thread that ends this process when another one has died or has been silent for `silence` seconds."""

    def __init__(self, links: dict[int, Link], count: int, silence: float, end: Callable[[str], object] | None = None):
        super().__init__(daemon=True)
        self.links, self.count, self.silence = links, count, silence
        self._end_process = end or end_process
        self.ending = threading.Event()
        for link in links.values():
            link.heard = time.monotonic()  # its hello may be minutes old: the last process came later
        atexit.register(self.leave)
        self.start()

    def leave(self) -> None:
        """Tells the others that this process ends in order and has not died."""
        for link in self.links.values():
            link.send(GOODBYE)

    def run(self) -> None:
        interval, next_beat = min(self.silence / 4, 5), 0.0
        while links := {index: link for index, link in self.links.items() if not link.left}:
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + interval
                for link in links.values():
                    link.send(ALIVE)
            # select() accepts no descriptor above 1,023. A Link has a fileno(), which is all that wait() needs.
            ready = wait(list(links.values()), interval)  # type: ignore[arg-type]
            for index, link in links.items():
                if link in ready:
                    self._read(index, link)
                elif time.monotonic() - link.heard > self.silence:
                    self._end(
                        f"{index} of {self.count} has given no sign of life for {self.silence:g} s (start_timeout / 5)"
                    )

    def _read(self, index: int, link: Link) -> None:
        try:
            for line in link.receive():
                word, _, text = line.partition(b" ")
                link.left |= word == GOODBYE
                if word == LOST:
                    self._end(escape(text.decode(errors="replace")))
        except OSError:
            if not link.left:
                self._end(f"{index} of {self.count} has died")

    def _end(self, what: str) -> None:
        self.ending.set()
        for link in self.links.values():
            link.send(LOST + b" " + what.encode())
        self._end_process(f"process {what}; see what it printed. Start all of them again (to train: train --resume)")


def end_process(reason: str) -> NoReturn:
    """Exits at once, as an orderly end would wait for a dead process; C++ prints nothing after the reason."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        error = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(error, f"\nshardformer: failed: {reason}\n".encode())
    os._exit(1)


PACKAGE = Path(shardformer.__file__).parent
LIBRARIES = ("dm-haiku", "optax", "numpy", "libtpu")  # besides JAX: another version may trace another program
# Settings of JAX that change a program.
SETTINGS = (
    "jax_enable_x64",
    "jax_default_matmul_precision",
    "jax_default_prng_impl",
    "jax_threefry_partitionable",
    "jax_disable_jit",
)


def describe_software() -> str:
    """Returns the versions, a hash of this package's source files and settings of JAX in one line."""
    config: Any = jax.config  # a type checker does not know its values
    return ", ".join([_describe_versions(), *(f"{name}={config.values.get(name)}" for name in SETTINGS)])


@functools.cache
def _describe_versions() -> str:
    python = ".".join(platform.python_version_tuple()[:2])
    versions = [f"jax {jax.__version__}", f"jaxlib {jaxlib.__version__}", f"Python {python}"]
    for name in LIBRARIES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions.append(f"{name} {metadata.version(name)}")
    return f"shardformer {shardformer.__version__} (code {_hash_sources(PACKAGE)}), {', '.join(versions)}"


def describe_difference(process: int, software: str, other: int, rest: str) -> str:
    """Returns the error for two processes with different software: the parts that differ."""
    parts, others = software.split(", "), rest.split(", ")
    mine = ", ".join(part for part in parts if part not in others)
    theirs = ", ".join(part for part in others if part not in parts)
    return f"process {process} runs {mine}, process {other} runs {theirs}; install and set the same on all machines"


def _hash_sources(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        content = path.read_bytes()
        digest.update(f"{path.relative_to(package).as_posix()} {len(content)}\n".encode() + content)
    return digest.hexdigest()[:12]
