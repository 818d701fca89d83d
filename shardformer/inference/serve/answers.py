"""The tokens of jobs as OpenAI's objects: choices, log-probabilities, usage and events of a stream."""

import dataclasses
import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

from shardformer.data import Vocabulary
from shardformer.inference.serve.call_stream import CallStream
from shardformer.inference.serve.jobs import Job, Tokens, Top
from shardformer.inference.serve.request_fields import Fields
from shardformer.inference.serve.text_offsets import TextOffsets
from shardformer.inference.serve.text_stream import INCOMPLETE, TextStream
from shardformer.inference.serve.tool_choice import describe_call


@dataclasses.dataclass(eq=False)
class Choice:
    """One continuation of a request."""

    job: Job
    stream: TextStream
    cut: Callable[..., str]
    prompt: str = ""  # what echo returns before the text
    calls: CallStream | None = None  # of a request with tools

    def message(self, text: str) -> dict[str, Any]:
        """Returns the message of a complete reply."""
        content, calls = self._split(text, ended=True)
        message = {"role": "assistant", "content": content}
        return message | {"content": content or None, "tool_calls": calls} if calls else message

    def delta(self, text: str, ended: bool = False) -> dict[str, Any]:
        """Returns what new text of a reply makes certain; ended: it was the last."""
        first = self.calls.count if self.calls else 0
        content, calls = self._split(text, ended)
        delta: dict[str, Any] = {} if ended and not content else {"content": content}
        return delta | {"tool_calls": [{"index": n, **call} for n, call in enumerate(calls, first)]} if calls else delta

    def _split(self, text: str, ended: bool) -> tuple[str, list[dict[str, Any]]]:
        if not self.calls:
            return text, []
        content, calls = self.calls.push(text, ended)
        return content, list(map(describe_call, calls))

    @property
    def reason(self) -> str:
        """Returns why the continuation ended."""
        if not self.job.stopped:
            return "length"
        return "tool_calls" if self.calls and self.calls.count else "stop"


class Answer:
    """The objects of one request. `tops` of the drawn tokens are collected as they come."""

    def __init__(self, fields: Fields, model: str, vocabulary: Vocabulary, choices: Sequence[Choice], chat: bool):
        self.fields, self.choices, self.chat, self._vocabulary = fields, choices, chat, vocabulary
        kind = "chat.completion" if chat else "text_completion"
        self._kind, self._event_kind = kind, f"{kind}.chunk" if chat else kind
        self._common = {
            "id": f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "seed": fields.sampling.seed,  # repeats the request's draws
        }
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
            text = choice.prompt + (choice.cut(job.ids) if job.draws else "")
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
            deltas = [{"text": choice.prompt} for choice in self.choices]
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

    def usage_event(self) -> dict[str, Any]:
        return self._common | {"object": self._event_kind, "choices": [], "usage": self.usage()}

    def usage(self) -> dict[str, int]:
        prompts = {id(choice.job.prompt): len(choice.job.prompt) for choice in self.choices}  # samples share theirs
        counts = sum(prompts.values()), sum(len(choice.job.ids) for choice in self.choices)
        return {"prompt_tokens": counts[0], "completion_tokens": counts[1], "total_tokens": sum(counts)}

    def _event(self, choice: dict[str, Any]) -> dict[str, Any]:
        return self._common | {"object": self._event_kind, "choices": [choice]}

    def _describe(self, index: int, tokens: Tokens, with_prompt: bool) -> dict[str, Any] | None:
        """Returns the log-probabilities of tokens, for echo after those of the prompt."""
        if not self.fields.logprobs:
            return None
        if self.chat:
            return {"content": [self._describe_token(*parts) for parts in zip(*tokens, strict=True)], "refusal": None}
        job, offsets = self.choices[index].job, self._offsets[index]
        ids, logprobs, tops = tokens
        values: list[float | None] = list(logprobs)
        listed: list[Top | None] = list(tops)
        start = len(self.choices[index].prompt)
        if with_prompt and job.scores_prompt:
            start = 0
            ids = [*job.prompt, *ids]
            values = [None, *(score for score, _ in job.prompt_scores), *values]
            listed = [None, *(top for _, top in job.prompt_scores), *listed]
        top_logprobs = [
            None if top is None or value is None else self._list_top(top, token, value)
            for top, token, value in zip(listed, ids, values, strict=True)
        ]
        return {
            "tokens": [self.spell(token) for token in ids],
            "token_logprobs": values,
            "top_logprobs": top_logprobs if self.fields.top else None,
            "text_offset": [start + offsets.push(token) for token in ids],
        }

    def _list_top(self, top: Top, token: int, logprob: float) -> dict[str, float]:
        """Returns the most likely tokens by their text, the drawn one among them."""
        result: dict[str, float] = {}
        for other, value in [*top, (token, logprob)]:
            result.setdefault(self.spell(other), value)
        return result

    def _describe_token(self, token: int, logprob: float, top: Top) -> dict[str, Any]:
        return self._entry(token, logprob) | {"top_logprobs": [self._entry(*pair) for pair in top]}

    def _entry(self, token: int, logprob: float) -> dict[str, Any]:
        text = self._decode_alone(token)
        content = None if text is None else list(text.encode("utf-8", "replace"))
        return {"token": self.spell(token), "logprob": logprob, "bytes": content}

    def spell(self, token: int) -> str:
        """Returns a token's text; token_id:N if it is not the text of complete characters."""
        text = self._decode_alone(token)
        return f"token_id:{token}" if text is None else text

    def _decode_alone(self, token: int) -> str | None:
        """Returns a token's text; None for a part of a character, and for entries that only the model has."""
        text = self._vocabulary.decode([token]) if token < len(self._vocabulary) else INCOMPLETE
        return None if INCOMPLETE in text else text
