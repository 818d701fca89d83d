"""The answer of /v1/responses: its object, and the events of its stream."""

import itertools
import time
import uuid
from typing import Any

from shardformer.data import Vocabulary
from shardformer.inference.serve.answers import Choice
from shardformer.inference.serve.jobs import Tokens
from shardformer.inference.serve.moderation import read_moderation
from shardformer.inference.serve.request_fields import ApiError, Fields
from shardformer.inference.serve.responses.output_items import Event, OutputItems
from shardformer.inference.serve.responses.response_request import ResponseRequest
from shardformer.inference.serve.responses.stored_responses import StoredResponses
from shardformer.inference.serve.token_entries import TokenEntries

# What a response has for fields that a request leaves out.
DEFAULTS: dict[str, Any] = {
    "instructions": None, "max_output_tokens": None, "max_tool_calls": None, "metadata": {},
    "parallel_tool_calls": True, "previous_response_id": None, "prompt_cache_key": None, "safety_identifier": None,
    "store": True, "tool_choice": "auto", "top_logprobs": 0, "truncation": "disabled",
}  # fmt: skip
TOOL = {"description": None, "parameters": None, "strict": None}


class ResponseAnswer:
    """One response. Its items are made as its tokens come, so that those of a stream are the same."""

    ending = b""

    def __init__(
        self, request: ResponseRequest, fields: Fields, model: str, choice: Choice, vocabulary: Vocabulary,
        stored: StoredResponses,
    ):  # fmt: skip
        self.fields = fields
        self._request, self._choice, self._stored = request, choice, stored
        self._entries, self._output, self._numbers = TokenEntries(vocabulary), OutputItems(), itertools.count()
        self._logprobs: list[dict[str, Any]] = []  # of tokens whose text is not certain yet
        self._common = self._repeat_fields() | {
            "id": f"resp_{uuid.uuid4().hex}", "object": "response", "created_at": int(time.time()), "model": model
        }  # fmt: skip

    def add(self, index: int, tokens: Tokens) -> None:
        """Takes new tokens for `as_object`."""
        self._grow(tokens)

    def as_object(self) -> dict[str, Any]:
        """Returns the complete response."""
        self._finish()
        return self._complete()

    def first_events(self) -> list[Event]:
        return self._number([{"type": f"response.{kind}", "response": self._describe("in_progress")}
                             for kind in ("created", "in_progress")])  # fmt: skip

    def next_events(self, index: int, tokens: Tokens | None) -> list[Event]:
        """Returns the events of new tokens, or of the end."""
        return self._number(self._grow(tokens) if tokens else self._finish())

    def final_events(self) -> list[Event]:
        response = self._complete()
        return self._number([{"type": f"response.{response['status']}", "response": response}])

    def describe_failure(self, error: ApiError) -> Event:
        """Returns the event of an error after the status was sent."""
        code = "server_error" if error.status >= 500 else "invalid_prompt"
        failed = self._describe("failed", error={"code": code, "message": str(error)})
        return self._number([{"type": "response.failed", "response": failed}])[0]

    def _grow(self, tokens: Tokens) -> list[Event]:
        if not self.fields.logprobs:
            return self._add(self._choice.stream.push(tokens.ids))
        events: list[Event] = []
        for token, entry in zip(tokens.ids, self._entries.describe(tokens), strict=True):
            self._logprobs.append(_with_bytes(entry))
            events += self._add(self._choice.stream.push([token]))  # only one, as its entry belongs to its text
        return events

    def _finish(self) -> list[Event]:
        events = self._add(self._choice.stream.finish(), ended=True)
        if not self._output.items:
            events += self._output.add_text("", [])
        return events + self._output.close("incomplete" if self._is_cut else "completed")

    def _add(self, text: str, ended: bool = False) -> list[Event]:
        events: list[Event] = []
        for part in self._choice.list_parts(text, ended):
            if isinstance(part, str):
                events += self._output.add_text(part, self._logprobs)
            else:
                events += self._output.add_call(*part)
            self._logprobs = []  # those of a call are in no item
        return events

    @property
    def _is_cut(self) -> bool:
        return self._choice.reason == "length"

    def _complete(self) -> dict[str, Any]:
        if self._is_cut:
            response = self._describe("incomplete", incomplete_details={"reason": "max_output_tokens"})
        else:
            response = self._describe("completed", completed_at=int(time.time()))
        response["usage"] = self._count_tokens()
        if self._request.is_stored:
            self._stored.add(response, self._request.conversation)
        return response

    def _describe(self, status: str, **more) -> dict[str, Any]:
        empty = {"error": None, "incomplete_details": None, "usage": None, "completed_at": None}
        return {**self._common, **empty, "status": status, "output": list(self._output.items), **more}

    def _repeat_fields(self) -> dict[str, Any]:
        body, sampling = self._request.body, self.fields.sampling
        repeated = {name: body.get(name, default) for name, default in DEFAULTS.items()}
        if "user" in body:  # the specification allows no null
            repeated["user"] = body["user"]
        return repeated | {
            "background": False,
            "moderation": read_moderation(self.fields.body),
            "reasoning": {"effort": None, "summary": None} | body.get("reasoning", {}),
            "seed": sampling.seed,  # repeats the request's draws
            "service_tier": "default",
            "temperature": sampling.temperature,
            "text": {"format": {"type": "text"}} | body.get("text", {}),
            "tools": [TOOL | tool for tool in body.get("tools", ())],
            "top_p": sampling.top_p,
        }

    def _count_tokens(self) -> dict[str, Any]:
        job = self._choice.job
        read, drawn = len(job.prompt), len(job.ids)
        return {
            "input_tokens": read,
            "input_tokens_details": {"cached_tokens": job.found_tokens, "cache_write_tokens": job.added_tokens},
            "output_tokens": drawn,
            "output_tokens_details": {"reasoning_tokens": 0},  # a thought is a part of the text
            "total_tokens": read + drawn,
        }

    def _number(self, events: list[Event]) -> list[Event]:
        return [event | {"sequence_number": next(self._numbers)} for event in events]


def _with_bytes(entry: dict[str, Any]) -> dict[str, Any]:
    """Returns an entry with a list of bytes, which is empty for a token that is no text alone."""
    tops = [top | {"bytes": top["bytes"] or []} for top in entry["top_logprobs"]]
    return entry | {"bytes": entry["bytes"] or [], "top_logprobs": tops}
