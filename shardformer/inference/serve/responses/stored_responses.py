"""The responses that later requests may read or continue, in bounded memory."""

import json
import threading
from typing import Any, NamedTuple

from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.serve.responses.input_items import make_messages

MOST_BYTES = 64_000_000  # of all responses, each with its conversation
LONGEST = 10_000_000  # bytes of one, as of a request's body: a larger one is not stored


class StoredResponse(NamedTuple):
    """A response and the messages before it, as JSON: Python's values of it may take 20 times as much memory."""

    response: bytes
    messages: bytes

    @property
    def size(self) -> int:
        return len(self.response) + len(self.messages)

    def read_messages(self) -> list[dict[str, Any]]:
        """Returns the messages of the conversation that the response ends."""
        return make_messages(json.loads(self.response)["output"], json.loads(self.messages))


class StoredResponses:
    """The newest responses; older ones make room for them. More than one thread may use them."""

    def __init__(self, most_bytes: int = MOST_BYTES, longest: int = LONGEST):
        self._most, self._longest, self._bytes = most_bytes, longest, 0
        self._stored: dict[str, StoredResponse] = {}  # the oldest first
        self._lock = threading.Lock()

    def add(self, response: dict[str, Any], messages: bytes) -> None:
        """Stores a response to messages, which are JSON."""
        added = StoredResponse(json.dumps(response).encode(), messages)
        if added.size > self._longest:
            return
        with self._lock:
            self._stored[response["id"]] = added
            self._bytes += added.size
            while self._bytes > self._most:
                self._drop(next(iter(self._stored)))

    def find(self, name: str, param: str | None = None) -> StoredResponse:
        """Returns a response; raises ApiError if it is not stored. param: the field that names it."""
        with self._lock:
            if name in self._stored:
                return self._stored[name]
        raise ApiError(
            404, f"response {name!r:.80} is not stored: it is unknown, too old, too large, or had store=false; send "
            "all of the conversation as input", param, "not_found",
        )  # fmt: skip

    def remove(self, name: str) -> None:
        self.find(name)
        with self._lock:
            self._drop(name)

    def _drop(self, name: str) -> None:
        if found := self._stored.pop(name, None):
            self._bytes -= found.size
