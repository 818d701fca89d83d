"""The bodies of requests: together they have bounded memory, and no slow one delays another."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

from starlette.requests import Request

from shardformer.inference.serve.limits import Limits
from shardformer.inference.serve.request_fields import ApiError


class Bodies:
    """The bodies that arrive or wait to be encoded. If they are too large together, the oldest that arrives ends."""

    def __init__(self, limits: Limits):
        self._limits = limits
        self._arriving: dict[asyncio.Timeout, bytearray] = {}  # the oldest first
        self._waiting = 0  # bytes

    def __len__(self) -> int:
        return len(self._arriving)

    @contextlib.asynccontextmanager
    async def receive(self, request: Request) -> AsyncIterator[bytes]:
        """Receives a body, which counts until the block ends."""
        content = await self._read(request)
        self._waiting += len(content)
        try:
            yield content
        finally:
            self._waiting -= len(content)

    async def _read(self, request: Request) -> bytes:
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
