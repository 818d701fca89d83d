"""The output of a response as it grows: messages and calls of functions, and the events that report them."""

import uuid
from typing import Any

from shardformer.inference.tool_calls.json_calls import Call

Event = dict[str, Any]


class OutputItems:
    """The items of one response. Only the last one, a message, may be open for more text."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._texts: list[str] = []  # of the open message
        self._logprobs: list[dict[str, Any]] = []
        self._is_open = False

    def add_text(self, text: str, logprobs: list[dict[str, Any]]) -> list[Event]:
        """Adds text to the open message, or to a new one, with the entries of its tokens."""
        events = [] if self._is_open else self._open_message()
        self._texts.append(text)
        self._logprobs += logprobs
        return [*events, self._report("output_text.delta", content_index=0, delta=text, logprobs=logprobs)]

    def add_call(self, call: Call, number: str) -> list[Event]:
        """Adds a call, which ends the open message. number: the id by which its output names it."""
        events = self.close()
        whole = {"type": "function_call", "id": f"fc_{uuid.uuid4().hex}", "call_id": number, **call._asdict(),
                 "status": "completed"}  # fmt: skip
        self.items.append(whole)
        return [
            *events,
            self._report("output_item.added", item=whole | {"arguments": "", "status": "in_progress"}),
            self._report("function_call_arguments.delta", delta=call.arguments),
            self._report("function_call_arguments.done", arguments=call.arguments, name=call.name),
            self._report("output_item.done", item=whole),
        ]

    def close(self, status: str = "completed") -> list[Event]:
        """Ends the open message, if there is one."""
        if not self._is_open:
            return []
        self._is_open = False
        text, logprobs = "".join(self._texts), self._logprobs
        part = _make_part(text, logprobs)
        self.items[-1] |= {"status": status, "content": [part]}
        return [
            self._report("output_text.done", content_index=0, text=text, logprobs=logprobs),
            self._report("content_part.done", content_index=0, part=part),
            self._report("output_item.done", item=self.items[-1]),
        ]

    def _open_message(self) -> list[Event]:
        self._is_open, self._texts, self._logprobs = True, [], []
        message = {"type": "message", "id": f"msg_{uuid.uuid4().hex}", "status": "in_progress", "role": "assistant",
                   "content": []}  # fmt: skip
        self.items.append(message)
        return [
            self._report("output_item.added", item=dict(message)),
            self._report("content_part.added", content_index=0, part=_make_part("", [])),
        ]

    def _report(self, kind: str, **fields) -> Event:
        """Returns an event about the last item."""
        place = {} if "item" in fields else {"item_id": self.items[-1]["id"]}
        return {"type": f"response.{kind}", "output_index": len(self.items) - 1, **place, **fields}


def _make_part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
