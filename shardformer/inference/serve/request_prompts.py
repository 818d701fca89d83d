"""The prompts of requests as token ids. Prompts that cannot fit are rejected before they are encoded."""

import json
from typing import Any, NamedTuple

from shardformer.data.chat.conversations import Conversation, make_conversation
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.serve.infill import join_around_gap
from shardformer.inference.serve.request_fields import MOST_CHOICES, ApiError, Fields, read_prompts, take
from shardformer.inference.serve.tool_choice import Tools
from shardformer.inference.text_codec import TextCodec

LONGEST_TOKEN = 256  # characters: a text with more for each token of the context is rejected before it is encoded


class Prompt(NamedTuple):
    """The ids that a model reads, and what echo repeats of them."""

    ids: list[int]
    text: str = ""  # empty without echo
    shown: slice = slice(None)  # of the ids: those of the text


class PromptReader:
    """Encodes prompts for a model's context. Threads may use it at once, each with a process of the chat template."""

    def __init__(self, codec: TextCodec, seq: int, vocab_size: int):
        self.codec, self.seq, self.vocab_size = codec, seq, vocab_size
        self._processes: list[TemplateProcess] = []  # idle ones: a start takes as long as the prefill of a small model

    def close(self) -> None:
        """Ends the processes of the template."""
        while self._processes:
            self._processes.pop().close()

    def read_completion(self, fields: Fields) -> list[Prompt]:
        """Returns each prompt; the first one that does not fit ends the encoding."""
        result, prompts = [], read_prompts(fields.body)
        suffix = take(fields.body, "suffix", str, "")
        if len(prompts) * fields.sampling.samples > MOST_CHOICES:
            raise ApiError(400, f"{len(prompts):,} prompts times n={fields.sampling.samples} are more than "
                           f"{MOST_CHOICES}; send fewer at once", "n")  # fmt: skip
        for prompt in prompts:
            if suffix:
                ids, shown = self._encode_around_gap(prompt, suffix)
            else:
                ids, shown = self.encode(prompt, "prompt"), slice(None)
            self.count_tokens(fields, len(ids))
            text = ""
            if fields.echo:
                text = prompt if isinstance(prompt, str) else self.codec.decode(ids[shown])
            result.append(Prompt(ids, text, shown))
        return result

    def encode(self, prompt: str | list[int], name: str) -> list[int]:
        """Returns the ids of a text, or given ids, checked; `name` is the field that holds them."""
        if not isinstance(prompt, str):
            return self._check_ids(prompt, name)
        self._check_characters(len(prompt), name)
        return (self.codec.encode(prompt, f"the {name}") if prompt else []) or [self.codec.prefix]

    def _encode_around_gap(self, prompt: str | list[int], suffix: str) -> tuple[list[int], slice]:
        before = self._encode_bare(prompt, "prompt") if isinstance(prompt, str) else self._check_ids(prompt, "prompt")
        return join_around_gap(self.codec, before, self._encode_bare(suffix, "suffix"))

    def _encode_bare(self, text: str, name: str) -> list[int]:
        self._check_characters(len(text), name)
        return self.codec.encode_bare(text, f"the {name}")

    def _check_characters(self, count: int, name: str) -> None:
        """Rejects a text that cannot fit; to encode megabytes would let other requests wait."""
        if count > LONGEST_TOKEN * self.seq:
            raise ApiError(400, f"{name} has {count:,} characters, too many for a context of {self.seq} tokens; "
                           "shorten it", name, "context_length_exceeded")  # fmt: skip

    def _check_ids(self, ids: list[int], name: str) -> list[int]:
        if not 0 <= min(ids) <= max(ids) < self.vocab_size:
            known = f"0..{self.vocab_size - 1}"
            raise ApiError(400, f"{name} has token ids outside {known}, which the model does not know", name)
        return ids

    def read_chat(self, chat: ChatCodec, fields: Fields, tools: Tools | None) -> list[int]:
        """Returns the ids of a chat's messages in the model's template."""
        messages = take(fields.body, "messages", list, None)
        if not messages:
            raise ApiError(400, "messages is missing; give a list of messages with role and content", "messages")
        record: dict[str, Any] = {"messages": messages, "tools": tools and tools.listed}
        self._check_characters(len(json.dumps(record)), "messages")
        options = take(fields.body, "chat_template_kwargs", dict, {})
        for name in ("reasoning_effort", "verbosity"):  # some templates write them into the prompt
            if value := take(fields.body, name, str, ""):
                options = {name: value, **options}
        conversation: Conversation = make_conversation(record | {"chat_template_kwargs": options}, "messages")
        process = self._processes.pop() if self._processes else chat.start_process()
        if not process.is_alive:  # it has ended, as one of another request that needed too much time
            process.close()
            process = chat.start_process()
        try:
            return chat.encode(process, conversation, tools.opening if tools else "")
        finally:
            self._processes.append(process)

    def count_tokens(self, fields: Fields, length: int) -> int:
        """Returns how many tokens a prompt of this length may draw; raises ApiError if they do not fit."""
        tokens = max(self.seq - length, 0) if fields.max_tokens is None else fields.max_tokens
        if length + tokens > self.seq or (tokens == 0 and fields.max_tokens is None):
            raise ApiError(
                400, f"the prompt has {length} tokens and max_tokens is {tokens}, together more than the model's "
                f"context, {self.seq}; shorten the prompt or max_tokens",
                "max_tokens" if length < self.seq else "prompt", "context_length_exceeded",
            )  # fmt: skip
        return tokens
