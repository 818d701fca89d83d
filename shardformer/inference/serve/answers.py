"""The tokens of jobs as OpenAI's objects: choices, log-probabilities, usage and events of a stream."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from shardformer.data import Vocabulary
from shardformer.inference.serve.call_stream import CallStream
from shardformer.inference.serve.jobs import Job, Tokens, Top
from shardformer.inference.serve.moderation import read_moderation
from shardformer.inference.serve.request_fields import ApiError, Fields
from shardformer.inference.serve.request_prompts import Prompt
from shardformer.inference.serve.text_offsets import TextOffsets
from shardformer.inference.serve.text_stream import TextStream
from shardformer.inference.serve.token_entries import TokenEntries
from shardformer.inference.serve.tool_choice import describe_call, make_call_id
from shardformer.inference.tool_calls.json_calls import Call


@dataclasses.dataclass(eq=False)
class Choice:
    """One continuation of a request."""

    job: Job
    stream: TextStream
    cut: Callable[..., str]
    prompt: Prompt  # its text is what echo returns before the continuation
    calls: CallStream | None = None  # of a request with tools

    def message(self, text: str) -> dict[str, Any]:
        """Returns the message of a complete reply."""
        content, calls = self.split(text, ended=True)
        message = {"role": "assistant", "content": content, "refusal": None}
        if not calls:
            return message
        return message | {"content": content or None, "tool_calls": [describe_call(*call) for call in calls]}

    def delta(self, text: str, ended: bool = False) -> dict[str, Any]:
        """Returns what new text of a reply makes certain; ended: it was the last."""
        first = self.calls.count if self.calls else 0
        content, calls = self.split(text, ended)
        delta: dict[str, Any] = {} if ended and not content else {"content": content}
        if not calls:
            return delta
        described = [{"index": n, **describe_call(*call)} for n, call in enumerate(calls, first)]
        return delta | {"tool_calls": described}

    def split(self, text: str, ended: bool) -> tuple[str, list[tuple[Call, str]]]:
        """Returns the content of new text, and its calls with a new id of each."""
        parts = self.list_parts(text, ended)
        return "".join(part for part in parts if isinstance(part, str)), [p for p in parts if not isinstance(p, str)]

    def list_parts(self, text: str, ended: bool) -> list[str | tuple[Call, str]]:
        """Returns the content and the calls of new text in their order, each call with a new id."""
        if not self.calls:
            return [text] if text else []
        parts = self.calls.push(text, ended)
        return [part if isinstance(part, str) else (part, make_call_id()) for part in parts]

    @property
    def reason(self) -> str:
        """Returns why the continuation ended."""
        if not self.job.stopped:
            return "length"
        return "tool_calls" if self.calls and self.calls.count else "stop"


class Answer:
    """The objects of one request. `tops` of the drawn tokens are collected as they come."""

    ending = b"data: [DONE]\n\n"

    def __init__(self, fields: Fields, model: str, vocabulary: Vocabulary, choices: Sequence[Choice], chat: bool):
        self.fields, self.choices, self.chat = fields, choices, chat
        self._entries = TokenEntries(vocabulary)
        kind = "chat.completion" if chat else "text_completion"
        self._kind, self._event_kind = kind, f"{kind}.chunk" if chat else kind
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": fields.sampling.seed,  # repeats the request's draws
        }
        if moderation := read_moderation(fields.body):
            self._common["moderation"] = moderation
        self._tops: dict[int, list[Top]] = {index: [] for index in range(len(choices))}
        self._offsets = [TextOffsets(vocabulary.decode) for _ in choices]

    def add(self, index: int, tokens: Tokens) -> None:
        """Collects new tokens of a choice for `as_object`."""
        self._tops[index] += tokens.tops

    def as_object(self) -> dict[str, Any]:
        """Returns the complete answer."""
        choices = []
        for index, choice in enumerate(self.choices):
            job = choice.job
            text = choice.prompt.text + (choice.cut(job.ids) if job.draws else "")
            content: dict[str, Any] = {"message": choice.message(text)} if self.chat else {"text": text}
            tokens = Tokens(job.ids, job.logprobs, self._tops[index])
            logprobs = self._describe(index, tokens, with_prompt=True)
            choices.append(content | {"index": index, "logprobs": logprobs, "finish_reason": choice.reason})
        return self._common | {"object": self._kind, "choices": choices, "usage": self.usage()}

    def first_events(self) -> list[dict[str, Any]]:
        """Returns the events before the first token: the role of a reply, or the prompt that echo repeats."""
        deltas: list[dict[str, Any]]
        if self.chat:
            deltas = [{"delta": {"role": "assistant", "content": ""}} for _ in self.choices]
        elif self.fields.echo:
            deltas = [{"text": choice.prompt.text} for choice in self.choices]
        else:
            return []
        return [self._event({"index": i, **delta, "logprobs": None, "finish_reason": None})
                for i, delta in enumerate(deltas)]  # fmt: skip

    def event(self, index: int, tokens: Tokens) -> dict[str, Any] | None:
        """Returns the event of new tokens; None if there is nothing to send yet."""
        choice = self.choices[index]
        text = choice.stream.push(tokens.ids)
        delta: dict[str, Any] = {"delta": choice.delta(text)} if self.chat else {"text": text}
        if not any(delta["delta"].values() if self.chat else text) and not self.fields.logprobs:
            return None
        logprobs = self._describe(index, tokens, with_prompt=False)
        return self._event({"index": index, **delta, "logprobs": logprobs, "finish_reason": None})

    def last_event(self, index: int) -> dict[str, Any]:
        """Returns the event with the rest of a choice's text and why it ended."""
        choice = self.choices[index]
        text = choice.stream.finish()
        delta: dict[str, Any] = {"delta": choice.delta(text, ended=True)} if self.chat else {"text": text}
        return self._event({"index": index, **delta, "logprobs": None, "finish_reason": choice.reason})

    def next_events(self, index: int, tokens: Tokens | None) -> list[dict[str, Any]]:
        """Returns the events of new tokens of a choice, or of its end."""
        event = self.event(index, tokens) if tokens else self.last_event(index)
        return [event] if event else []

    def final_events(self) -> list[dict[str, Any]]:
        """Returns the events after the end of all choices."""
        usage = self._common | {"object": self._event_kind, "choices": [], "usage": self.usage()}
        return [usage] if self.fields.with_usage else []

    def describe_failure(self, error: ApiError) -> dict[str, Any]:
        """Returns the event of an error after the status was sent."""
        return error.body

    def usage(self) -> dict[str, Any]:
        firsts = [choice.job for choice in self.choices if choice.job.sample == 0]  # the others have the same prompts
        counts = sum(len(job.prompt) for job in firsts), sum(len(choice.job.ids) for choice in self.choices)
        found = sum(job.found_tokens for job in firsts)
        return {
            "prompt_tokens": counts[0],
            "completion_tokens": counts[1],
            "total_tokens": sum(counts),
            "prompt_tokens_details": {"cached_tokens": found},
        }

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._common | {"object": self._event_kind, "choices": [choice]}

    def _describe(self, index: int, tokens: Tokens, with_prompt: bool) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, for echo after those of the prompt."""
        if not self.fields.logprobs:
            return None
        if self.chat:
            return {"content": self._entries.describe(tokens), "refusal": None}
        job, prompt, offsets = self.choices[index].job, self.choices[index].prompt, self._offsets[index]
        ids, logprobs, tops = tokens
        values: list[float | None] = list(logprobs)
        listed: list[Top | None] = list(tops)
        start = len(prompt.text)
        if with_prompt and job.scores_prompt:
            start = 0
            ids = [*job.prompt[prompt.shown], *ids]
            values = [*[None, *(score for score, _ in job.prompt_scores)][prompt.shown], *values]
            listed = [*[None, *(top for _, top in job.prompt_scores)][prompt.shown], *listed]
        top_logprobs = [
            None if top is None or value is None else self._entries.list_top(top, token, value)
            for top, token, value in zip(listed, ids, values, strict=True)
        ]
        return {
            "tokens": [self._entries.spell(token) for token in ids],
            "token_logprobs": values,
            "top_logprobs": top_logprobs if self.fields.top else None,
            "text_offset": [start + offsets.push(token) for token in ids],
        }
