"""How processes that train together find each other at the start, and notice when one of them is gone.

Every process keeps one connection to process 0, made on the coordinator's port before JAX's own service takes it over.
JAX alone would wait silently, not say who is missing, and end in a C++ stack trace.
"""

import atexit
import contextlib
import errno
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from typing import NoReturn

from shardformer.errors import RunError, UsageError

HELLO = "shardformer"
ALIVE, GOODBYE, LOST, GO, REFUSED = (word.encode() for word in ("alive", "goodbye", "lost", "go", "refused"))
RETRY = 0.5  # seconds between attempts to connect
REMIND = 10  # seconds between two lines that say who is missing


class Link:
    """A connection that carries lines."""

    def __init__(self, connection: socket.socket):
        connection.settimeout(None)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.connection, self.buffer = connection, b""
        self.heard, self.left = time.monotonic(), False

    def fileno(self) -> int:
        return self.connection.fileno()

    def send(self, line: bytes) -> None:
        with contextlib.suppress(OSError):  # a partner that is gone is noticed when it is read
            self.connection.sendall(line + b"\n")

    def is_closed(self) -> bool:
        """Whether the partner has ended, without a wait."""
        try:
            return not self.connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def receive(self) -> list[bytes]:
        """The lines that have come, after a wait for some; ConnectionError when the partner has closed it."""
        more = self.connection.recv(4096)
        if not more:
            raise ConnectionResetError
        self.heard = time.monotonic()
        *lines, self.buffer = (self.buffer + more).split(b"\n")
        if len(self.buffer) > 4096:
            raise ConnectionResetError
        return lines

    def receive_one(self, seconds: float) -> bytes:
        self.connection.settimeout(seconds)
        try:
            while not (lines := self.receive()):
                pass
            return lines[0]
        finally:
            self.connection.settimeout(None)


def connect(
    address: str, count: int, index: int, timeout: float, say: Callable[[str], None], source: str = ""
) -> dict[int, Link]:
    """Returns when all `count` processes are there: on process 0 the links to all others, elsewhere the one to it.

    `source` is what has counted them, where no key did.
    """
    waiting = _Waiting(time.monotonic() + timeout, timeout, count, say, source)
    host, _, port = address.rpartition(":")
    if index == 0:
        return _accept_all(int(port), count, waiting)
    return {0: _reach_first(host.strip("[]"), int(port), count, index, waiting)}


class _Waiting:
    """Says who is missing while a process waits, and until when it does."""

    def __init__(self, deadline: float, timeout: float, count: int, say: Callable[[str], None], source: str):
        self.deadline, self.timeout, self.count, self.say = deadline, timeout, count, say
        how = f": {source} has {count} processes" if source else ", each with its own process_id"
        self.advice = f"start the same command on every machine{how}"
        self.next_line = time.monotonic() + 1

    def check(self, missing: list[int], where: str = "") -> None:
        """Raises when the time is up."""
        named = f"process{'es' if len(missing) > 1 else ''} {', '.join(map(str, missing))} of {self.count}{where}"
        if time.monotonic() > self.deadline:
            raise RunError(f"{named} did not answer within {self.timeout:g} s (start_timeout); {self.advice}")
        if time.monotonic() > self.next_line:
            self.next_line = time.monotonic() + REMIND
            left = self.deadline - time.monotonic()
            self.say(f"waiting for {named}, for at most {left:.0f} s more; {self.advice}")


def _accept_all(port: int, count: int, waiting: _Waiting) -> dict[int, Link]:
    links: dict[int, Link] = {}
    with _listen(port) as listener:
        listener.settimeout(RETRY)
        try:
            while missing := [index for index in range(1, count) if index not in links]:
                waiting.check(missing)
                with contextlib.suppress(TimeoutError):
                    index, link = _welcome(listener.accept()[0], count)
                    if index in links and not links[index].is_closed():  # else it has been started again
                        raise UsageError(f"two processes call themselves process_id={index}; give each its own")
                    if index is not None:
                        links[index] = link
        except (RunError, UsageError) as error:
            for link in links.values():
                link.send(REFUSED + b" " + str(error).encode())
            raise
    for link in links.values():
        link.send(GO)
    return links


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise UsageError(
                f"port {port} of coordinator= is in use on this machine, perhaps by another run; choose another port, "
                "the same on all processes"
            ) from None
        raise UsageError(f"cannot listen on port {port} of coordinator=: {error.strerror}; choose another") from None


def _welcome(connection: socket.socket, count: int) -> tuple[int | None, Link]:
    """Who has connected; None for a stranger."""
    link = Link(connection)
    try:
        name, index, their_count = link.receive_one(5).decode().split()
        index, their_count = int(index), int(their_count)
    except (OSError, ValueError):
        connection.close()
        return None, link
    if name != HELLO or not 0 < index < count or their_count != count:
        differ = f"process 0 was given processes={count}, another processes={their_count}; give all the same"
        link.send(REFUSED + b" " + differ.encode())
        return None, link
    return index, link


def _reach_first(host: str, port: int, count: int, index: int, waiting: _Waiting) -> Link:
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
    link.send(f"{HELLO} {index} {count}".encode())
    while True:
        with contextlib.suppress(TimeoutError):
            try:
                word, _, reason = link.receive_one(RETRY).partition(b" ")
            except ConnectionError:
                raise RunError(f"process 0 of {count}{where} has closed the connection; see what it printed") from None
            if word == GO:
                return link
            raise RunError(reason.decode() if word == REFUSED else f"{host}:{port} belongs to another program")
        if time.monotonic() > waiting.deadline + 10:  # process 0 knows better who is missing, and says so first
            waiting.check([0], where)


class Watch(threading.Thread):
    """Ends this process with one line as soon as another has died, or has been silent for `heartbeat` seconds."""

    def __init__(self, links: dict[int, Link], count: int, heartbeat: float):
        super().__init__(daemon=True)
        self.links, self.count, self.heartbeat = links, count, heartbeat
        self.ending = threading.Event()
        for link in links.values():
            link.heard = time.monotonic()  # not since its hello: the last process may have come minutes later
        atexit.register(self.leave)
        self.start()

    def leave(self) -> None:
        """An orderly end, which the others must not take for a death."""
        for link in self.links.values():
            link.send(GOODBYE)

    def run(self) -> None:
        interval, next_beat = min(self.heartbeat / 4, 5), 0.0
        while links := {index: link for index, link in self.links.items() if not link.left}:
            if time.monotonic() > next_beat:
                next_beat = time.monotonic() + interval
                for link in links.values():
                    link.send(ALIVE)
            ready = wait(list(links.values()), interval)  # select() takes no descriptor above 1,023
            for index, link in links.items():
                if link in ready:
                    self._read(index, link)
                elif time.monotonic() - link.heard > self.heartbeat:
                    self._end(f"{index} of {self.count} has given no sign of life for {self.heartbeat:g} s (heartbeat)")

    def _read(self, index: int, link: Link) -> None:
        try:
            for line in link.receive():
                word, _, text = line.partition(b" ")
                link.left |= word == GOODBYE
                if word == LOST:
                    self._end(text.decode())
        except OSError:
            if not link.left:
                self._end(f"{index} of {self.count} has died")

    def _end(self, what: str) -> None:
        self.ending.set()
        for link in self.links.values():
            link.send(LOST + b" " + what.encode())
        end_process(f"process {what}; what it printed says why. Start all of them again (to train: train --resume)")


def end_process(reason: str) -> NoReturn:
    """Exits at once, as an orderly end would wait for a process that is gone; C++ prints nothing after the reason."""
    with contextlib.suppress(OSError, ValueError):
        sys.stdout.flush()
        sys.stderr.flush()
    with contextlib.suppress(OSError):
        error = os.dup(2)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.write(error, f"\nshardformer: failed: {reason}\n".encode())
    os._exit(1)
