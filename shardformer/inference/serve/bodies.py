"""The bodies of requests: together they have bounded memory, and no slow one delays another."""

import asyncio
import contextlib
import dataclasses
import resource
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from shardformer.inference.serve.request_fields import ApiError

if TYPE_CHECKING:  # `serve --help`, and its advice to install the extra, work without starlette
    from starlette.requests import Request


def count_connections() -> int:
    """Returns how many connections may be open: half of the descriptors, as checkpoints and templates need some too."""
    return min(resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2, MOST_CONNECTIONS)


@dataclasses.dataclass
class Limits:
    """The bounds of one server, which keep it answering whatever its clients do."""

    seconds: float = 600.0  # of one request
    header_seconds: float = 10.0  # from the connection, or the last answer, to the end of a request's headers
    body_seconds: float = 60.0
    body_bytes: int = 10_000_000
    bodies_bytes: int = 160_000_000  # of all bodies that arrive or wait to be encoded
    connections: int = dataclasses.field(default_factory=count_connections)


class Bodies:
    """The bodies that arrive or wait to be encoded. If they are too large together, the oldest that arrives ends."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._arriving: dict[asyncio.Timeout, bytearray] = {}  # the oldest first
        self._waiting = 0  # bytes

    def __len__(self) -> int:
        return len(self._arriving)

    @contextlib.asynccontextmanager
    async def receive(self, request: "Request") -> AsyncIterator[bytes]:
        """Receives a body, which counts until the block ends."""
        content = await self._read(request)
        self._waiting += len(content)
        try:
            yield content
        finally:
            self._waiting -= len(content)

    async def _read(self, request: "Request") -> bytes:
        limit, content, deadline = self._limits.body_bytes, bytearray(), asyncio.timeout(self._limits.body_seconds)
        too_large = ApiError(413, f"the body has more than {limit:,} bytes; send less at once", code="body_too_large")
        declared = request.headers.get("content-length", "0")
        if declared.isdecimal() and int(declared) > limit:
            raise too_large
        self._arriving[deadline] = content
        try:
            async with deadline:
                async for part in request.stream():
                    content += part
                    if len(content) > limit:
                        raise too_large
                    self._free_memory()
        except TimeoutError:
            if deadline in self._arriving:
                raise ApiError(408, "the body did not arrive in time; send it again") from None
            raise ApiError(429, "too many large bodies arrive; send it again later", code="bodies_full") from None
        finally:
            self._arriving.pop(deadline, None)
        return bytes(content)

    def _free_memory(self) -> None:
        """Ends the oldest bodies that arrive: those of a client that stalls, rather than one that sends."""
        while self._arriving and self._waiting + sum(map(len, self._arriving.values())) > self._limits.bodies_bytes:
            oldest = next(iter(self._arriving))
            del self._arriving[oldest]
            if not oldest.expired():
                oldest.reschedule(0)


MOST_CONNECTIONS = 4096
