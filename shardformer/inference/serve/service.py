"""The models that a server offers, and requests as jobs of its engine."""

import asyncio
import bisect
import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeVar

from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.sampling import Stops
from shardformer.inference.serve.answers import Answer, Choice
from shardformer.inference.serve.bodies import Bodies, Limits
from shardformer.inference.serve.embeddings import MOST_INPUTS, EmbeddingAnswer, EmbeddingFields, read_embedding_fields
from shardformer.inference.serve.engine_thread import EngineThread
from shardformer.inference.serve.exchange import AnswerType, Exchange
from shardformer.inference.serve.jobs import Job, Weights
from shardformer.inference.serve.request_fields import ApiError, Fields, parse_body, read_fields, read_prompts
from shardformer.inference.serve.request_prompts import Prompt, PromptReader
from shardformer.inference.serve.response_format import Forms
from shardformer.inference.serve.responses.response_answer import ResponseAnswer
from shardformer.inference.serve.responses.response_request import read_request, rename_fields
from shardformer.inference.serve.responses.stored_responses import StoredResponses
from shardformer.inference.serve.text_stream import TextStream
from shardformer.inference.serve.token_bias import DrawRules, read_bias
from shardformer.inference.serve.tool_choice import Tools, read_tools
from shardformer.inference.text_codec import TextCodec

SHORT_BODY = 100_000  # bytes: such bodies never wait for a longer one to be encoded
SHORT_ENCODERS = 2  # threads that encode short bodies, each with at most one process of a chat template
Result = TypeVar("Result")


@dataclasses.dataclass
class Served:
    """A model that requests may name. `weights` is replaced when a newer checkpoint is taken."""

    name: str
    weights: Weights
    created: int = dataclasses.field(default_factory=lambda: int(time.time()))


class Asked(NamedTuple):
    """A checked completion or chat."""

    fields: Fields
    model: Served
    prompts: list[Prompt]
    rules: DrawRules
    tools: Tools | None


class Service:
    """All that the endpoints share. The first model answers requests that name none."""

    def __init__(
        self,
        thread: EngineThread,
        models: Sequence[Served],
        codec: TextCodec,
        chat: ChatCodec | None = None,
        api_key: str = "",
        limits: Limits | None = None,
        hosts: frozenset[str] | None = None,
    ):
        """hosts: the names and addresses that a request may give as its Host; None for any."""
        self.thread, self.metrics, self.codec, self.chat = thread, thread.metrics, codec, chat
        self.models = {model.name: model for model in models}
        self.api_key, self.limits, self.hosts = api_key, limits or Limits(), hosts
        self.bodies = Bodies(self.limits)
        self.responses = StoredResponses()
        self._forms = Forms(codec.vocabulary)
        self._short, self._long = asyncio.Semaphore(SHORT_ENCODERS), asyncio.Semaphore(1)
        self.prompts = PromptReader(codec, thread.engine.config.seq, thread.engine.vocab_size)
        self._first = models[0]
        self.exchanges: set[Exchange] = set()  # that run

    @property
    def seq(self) -> int:
        return self.thread.engine.config.seq

    def end_all(self) -> None:
        """Ends the requests that still run, as the server stops."""
        for exchange in self.exchanges:
            exchange.fail(ApiError(503, "the server stops; ask again later", code="server_stops"))

    def close(self) -> None:
        """Ends the engine's thread and the processes of the templates."""
        self.thread.stop()
        self.prompts.close()

    def find_model(self, name: str | None) -> Served:
        if name is None or name in self.models:
            return self._first if name is None else self.models[name]
        known = ", ".join(self.models)
        raise ApiError(404, f"model {name!r:.80} is not served; there is {known}", "model", "model_not_found")

    async def start(self, content: bytes, chat: bool) -> Exchange[Answer]:
        """Checks the body of a completion or of a chat and queues its jobs."""
        asked = await self._read_apart(lambda: self._read(parse_body(content), chat), content)
        choices = self._make_choices(asked, chat)
        answer = Answer(asked.fields, asked.model.name, self.codec.vocabulary, choices, chat)
        return self._submit(answer, [choice.job for choice in choices])

    async def start_response(self, content: bytes) -> Exchange[ResponseAnswer]:
        """Checks the body of a request for a response and queues its job."""
        request = await self._read_apart(lambda: read_request(parse_body(content), self.responses), content)
        try:
            asked = await self._read_apart(lambda: self._read_first_that_fits(request.list_chats()), content)
            (choice,) = self._make_choices(asked, chat=True)
        except ApiError as error:
            raise rename_fields(error) from None
        model, vocabulary = asked.model.name, self.codec.vocabulary
        answer = ResponseAnswer(request, asked.fields, model, choice, vocabulary, self.responses)
        return self._submit(answer, [choice.job])

    async def start_embeddings(self, content: bytes) -> Exchange[EmbeddingAnswer]:
        """Checks the body of a request for vectors and queues its jobs."""
        fields, prompts = await self._read_apart(lambda: self._read_embeddings(content), content)
        model = self.find_model(fields.model)
        jobs = [Job(n, ids, 0, weights=model.weights, draws=False, pooling=fields.pooling)
                for n, ids in enumerate(prompts)]  # fmt: skip
        return self._submit(EmbeddingAnswer(fields, model.name, jobs), jobs)

    def _submit(self, answer: AnswerType, jobs: list[Job]) -> Exchange[AnswerType]:
        exchange = Exchange(self.thread, answer, jobs, self.limits.seconds, self.exchanges)
        exchange.submit()
        self.metrics.prompt_tokens += sum(len(job.prompt) for job in jobs if job.sample == 0)
        return exchange

    async def _read_apart(self, read: Callable[[], Result], content: bytes) -> Result:
        """Returns what a function reads from a body in a thread; short bodies do not wait for long ones."""
        async with self._short if len(content) <= SHORT_BODY else self._long:
            try:
                return await asyncio.to_thread(read)
            except RecursionError:
                raise ApiError(400, "the body is nested too deeply; make it simpler") from None

    def _read_embeddings(self, content: bytes) -> tuple[EmbeddingFields, list[list[int]]]:
        """Returns the fields of a body, and the ids of each text; the first one that does not fit ends the encoding."""
        body = {name: value for name, value in parse_body(content).items() if value is not None}
        fields = read_embedding_fields(body, self.thread.engine.config.d_model)
        self.find_model(fields.model)
        inputs, most = read_prompts(body, "input"), min(MOST_INPUTS, self.thread.capacity)
        result: list[list[int]] = []
        if len(inputs) > most:
            raise ApiError(400, f"input has {len(inputs):,} entries; expected at most {most:,}", "input")
        for n, text in enumerate(inputs):
            if not text:
                raise ApiError(400, f"input {n} is empty; leave it out", "input")
            try:
                ids = self.prompts.encode(text, "input")
            except UsageError as error:
                raise ApiError(400, str(error), "input") from None
            if len(ids) > self.seq:
                raise ApiError(400, f"input {n} has {len(ids):,} tokens, more than the model's context, {self.seq}; "
                               "shorten it", "input", "context_length_exceeded")  # fmt: skip
            result.append(ids)
        return fields, result

    def _read_first_that_fits(self, chats: list[dict]) -> Asked:
        """Reads the first of chats that are ever shorter whose prompt leaves room for the answer; else the last."""

        def fits(chat: dict) -> bool:
            try:
                asked = self._read(chat, chat=True)
                self.prompts.count_tokens(asked.fields, len(asked.prompts[0].ids))
            except ApiError as error:
                return error.code != "context_length_exceeded"
            return True

        number = bisect.bisect_left(chats, True, hi=len(chats) - 1, key=fits)
        return self._read(chats[number], chat=True)

    def _read(self, body: dict, chat: bool) -> Asked:
        """Checks the body of a chat or of a completion, and encodes its prompts."""
        fields = read_fields(body, chat)
        model = self.find_model(fields.model)
        if chat and not self.chat:
            raise ApiError(400, f"{model.name} has no chat template; use /v1/completions")
        tools = read_tools(fields.body, self.chat.format) if self.chat and chat else None
        try:
            if self.chat and chat:
                prompts = [Prompt(self.prompts.read_chat(self.chat, fields, tools))]
            else:
                prompts = self.prompts.read_completion(fields)
        except UsageError as error:
            raise ApiError(400, str(error), "messages" if chat else "prompt") from None
        bias = read_bias(fields.body, self.thread.engine.vocab_size, self.codec.encode_bare)
        form = self._forms.read(fields.body)
        if tools and tools.is_forced:
            form = self._forms.find(tools.identity, tools.make_rules, "tools")
        return Asked(fields, model, prompts, DrawRules(bias, form), tools)

    def _make_choices(self, asked: Asked, chat: bool) -> list[Choice]:
        fields, tools = asked.fields, asked.tools
        codec = self._make_codec(fields, asked.rules, tools) if chat else None
        jobs = self._make_jobs(fields, [prompt.ids for prompt in asked.prompts], asked.model.weights, codec)
        choices = [self._make_choice(fields, job, asked.prompts[job.number // fields.sampling.samples], codec, tools)
                   for job in jobs]  # fmt: skip
        for job in jobs:
            asked.rules.apply(job, self._choose_ends(fields))
        return choices

    def _make_jobs(
        self, fields: Fields, prompts: list[list[int]], weights: Weights, codec: ChatCodec | None
    ) -> list[Job]:
        tokens = self.prompts.count_tokens(fields, max(map(len, prompts)))
        sampling = dataclasses.replace(fields.sampling, tokens=max(tokens, 1))
        stops = (
            codec.make_stops(fields.sampling.ignore_eos)
            if codec
            else Stops(self.codec.vocabulary, fields.stops, self._choose_ends(fields))
        )
        scored = fields.echo and fields.logprobs
        return [
            Job(
                number * sampling.samples + sample, ids, sample, sampling=sampling, weights=weights, stops=stops,
                top=fields.top, scores_prompt=scored, draws=tokens > 0,
            )
            for number, ids in enumerate(prompts)
            for sample in range(sampling.samples)
        ]  # fmt: skip

    def _make_codec(self, fields: Fields, rules: DrawRules, tools: Tools | None) -> ChatCodec:
        """Returns the codec of a reply; the string that ends a turn, such as a line feed, may be a part of JSON."""
        assert self.chat
        codec = self.chat.with_stops(fields.stops, only=rules.form is not None)
        return codec.with_retained(tools.format.special) if tools else codec

    def _choose_ends(self, fields: Fields) -> frozenset[int]:
        """Returns the tokens that end a text."""
        if fields.sampling.ignore_eos:
            return frozenset()
        return self.chat.ends if "messages" in fields.body and self.chat else self.codec.ends

    def _make_choice(
        self, fields: Fields, job: Job, prompt: Prompt, codec: ChatCodec | None, tools: Tools | None
    ) -> Choice:
        """Returns a choice whose text is that of `generate`."""
        if codec:
            stream = TextStream(codec.decode, codec.read_reply, codec.strings, frozenset(codec.ends))
            return Choice(job, stream, codec.read_reply, prompt, calls=tools and tools.make_stream())
        assert isinstance(job.stops, Stops)
        decode, cut = self.codec.vocabulary.decode, job.stops.cut
        return Choice(job, TextStream(decode, cut, fields.stops, self._choose_ends(fields)), cut, prompt)
