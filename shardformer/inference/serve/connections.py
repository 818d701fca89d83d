"""The connections of the server: how long a request may take to arrive, and how many may be open."""

import asyncio
import functools
import logging
import time
from typing import Any, cast

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from shardformer.inference.serve.bodies import Limits
from shardformer.messages import log

BACKLOG = 128  # connections that the loop accepts at once, before it can close others
SPARE_SECONDS = 5.0  # after the time of a body, in which the endpoint answers that it was late
LOG_SECONDS = 60.0  # between two lines about too many connections


class Connections:
    """The open connections that wait for a request, the rest of one, or a client that does not read; oldest first."""

    def __init__(self, limits: Limits):
        self.limits, self.waiting = limits, dict[Connection, None]()
        self._next_line = 0.0

    def keep_few(self, count: int) -> None:
        """Closes the connection that has waited longest if `count`, with a new one, are too many."""
        if count <= self.limits.connections:
            return
        next(iter(self.waiting)).end()
        if time.monotonic() >= self._next_line:
            self._next_line = time.monotonic() + LOG_SECONDS
            log.warning(
                f"more than {self.limits.connections} connections are open; those that wait longest for their clients "
                "are closed"
            )


class Connection(H11Protocol):
    """A connection that is closed if a request does not arrive in time, or if it waits longest of too many."""

    def __init__(self, *arguments: Any, among: Connections, **named: Any):
        super().__init__(*arguments, **named)
        self._among = among
        self._awaited = ""  # the part of a request that has to arrive
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_request()
        self._among.keep_few(len(self.connections))

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._await_request()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._await_request()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._among.waiting[self] = None  # for its client, which does not read

    def resume_writing(self) -> None:
        super().resume_writing()
        if not self._awaited:
            self._among.waiting.pop(self, None)

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self._stop_waiting()

    def end(self) -> None:
        """Closes the connection at once."""
        self._stop_waiting()
        self.transport.abort()

    def _await_request(self) -> None:
        """Starts the time of the headers or of the body as soon as the client owes them."""
        awaited = "headers"
        if self.conn.their_state is h11.SEND_BODY:
            awaited = "body"
        elif self.cycle and not self.cycle.response_complete:
            awaited = ""
        if awaited == self._awaited:
            return
        self._stop_waiting()
        self._awaited = awaited
        if awaited:
            self._among.waiting[self] = None
            limits = self._among.limits
            # A client that still reads the last answer has as long for it as for a body.
            is_reading = self.transport.get_write_buffer_size() > 0
            body_seconds = limits.body_seconds + SPARE_SECONDS
            seconds = body_seconds if awaited == "body" or is_reading else limits.header_seconds
            self._timer = self.loop.call_later(seconds, self.end)

    def _stop_waiting(self) -> None:
        self._among.waiting.pop(self, None)
        if self._timer:
            self._timer.cancel()


def make_config(app: Any, limits: Limits, **options: Any) -> uvicorn.Config:
    """Returns the configuration of a server with these connections."""
    protocol = functools.partial(Connection, among=Connections(limits))
    return uvicorn.Config(
        app, http=cast(Any, protocol), ws="none", log_config=None, access_log=False, server_header=False,
        backlog=BACKLOG, log_level=logging.ERROR, **options,
    )  # fmt: skip
