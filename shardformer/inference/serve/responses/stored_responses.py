"""The responses that later requests may read or continue, in bounded memory."""

import json
import threading
from typing import Any, NamedTuple

from shardformer.inference.serve.request_fields import ApiError

MOST_BYTES = 64_000_000  # of all responses as JSON, each with its conversation


class StoredResponse(NamedTuple):
    """A response, and the items of the conversation that it ends."""

    response: dict[str, Any]
    conversation: list[dict[str, Any]]
    size: int  # bytes as JSON


class StoredResponses:
    """The newest responses; older ones make room for them. More than one thread may use them."""

    def __init__(self, most_bytes: int = MOST_BYTES):
        self._most, self._bytes = most_bytes, 0
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._lock = threading.Lock()

    def add(self, response: dict[str, Any], items: list[dict[str, Any]]) -> None:
        """Stores a response to some items."""
        conversation = [*items, *response["output"]]
        size = len(json.dumps([response, conversation]))
        with self._lock:
            self._stored[response["id"]] = StoredResponse(response, conversation, size)
            self._bytes += size
            while self._bytes > self._most:
                self._drop(next(iter(self._stored)))

    def find(self, name: str, param: str | None = None) -> StoredResponse:
        """Returns a response; raises ApiError if it is not stored. param: the field that names it."""
        with self._lock:
            if name in self._stored:
                return self._stored[name]
        raise ApiError(
            404, f"response {name!r:.80} is not stored: it is unknown, too old, or had store=false; send all of the "
            "conversation as input", param, "not_found",
        )  # fmt: skip

    def remove(self, name: str) -> None:
        self.find(name)
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if found := self._stored.pop(name, None):
            self._bytes -= found.size
