"""The bodies of /v1/completions and /v1/chat/completions: which fields they may have, and what each means here."""

import dataclasses
import json
import secrets
from collections.abc import Sequence
from typing import Any

from shardformer.config.sampling_keys import MOST_TOKENS, Sampling
from shardformer.errors import UsageError
from shardformer.inference.serve.slot_programs import MOST_TOP

MOST_CHOICES = 128  # continuations of one request
MOST_STOPS = 16
COMPLETION_TOKENS = 16  # OpenAI's default of max_tokens
# They change no token; a prediction changes only OpenAI's speed, and audio only answers that are no text. Answers to
# web_search_options name no page, so that a client knows that none was read.
IGNORED = (
    "user", "metadata", "store", "service_tier", "prompt_cache_key", "prompt_cache_options",
    "prompt_cache_retention", "safety_identifier",
)  # fmt: skip
IGNORED_IN_CHAT = ("prediction", "audio", "web_search_options")
# Fields of OpenAI that the engine does not compute, and the values with which they change nothing.
NEUTRAL: dict[str, tuple] = {"modalities": (["text"],), "function_call": ("none",)}
SAMPLING = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "ignore_eos", "seed")
BIASES = ("logit_bias", "presence_penalty", "frequency_penalty", "response_format")
ANSWERED = ("model", "n", "stream", "stream_options", "stop", "max_tokens", "best_of")
COMMON = (*ANSWERED, *SAMPLING, *BIASES, *IGNORED)
OF_COMPLETIONS = (*COMMON, "prompt", "logprobs", "echo", "suffix")
RENAMED = {"functions": "tools", "function_call": "tool_choice"}  # OpenAI's first names
TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
OF_CHAT = (
    *COMMON, *TOOLS, *IGNORED_IN_CHAT, "messages", "logprobs", "top_logprobs", "max_completion_tokens", "modalities",
    "verbosity", "reasoning_effort", "chat_template_kwargs", "moderation", "functions", "function_call",
)  # fmt: skip


class ApiError(Exception):
    """An error in OpenAI's form, which answers a request: what was got, what was expected, the fix."""

    def __init__(self, status: int, message: str, param: str | None = None, code: str | None = None):
        super().__init__(message)
        self.status, self.param, self.code = status, param, code

    @property
    def body(self) -> dict[str, Any]:
        types = {401: "authentication_error", 429: "rate_limit_error"}
        kind = types.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


@dataclasses.dataclass(frozen=True)
class Fields:
    """The checked fields of a request that both endpoints have."""

    body: dict[str, Any]
    model: str | None
    sampling: Sampling  # its tokens and samples are `max_tokens` and `n`
    max_tokens: int | None  # None: as many as fit; 0: none, as to score only the prompt
    stops: list[str]
    stream: bool
    with_usage: bool  # a last event of a stream
    top: int  # most likely tokens to report
    logprobs: bool
    echo: bool = False


def parse_body(content: bytes) -> dict[str, Any]:
    """Returns the object of a request's body."""
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise ApiError(400, f"the body is not JSON ({error!s:.100}); send one JSON object") from None
    if not isinstance(body, dict):
        raise ApiError(400, f"the body is a JSON {type(body).__name__}; send one JSON object")
    return body


def read_fields(body: dict[str, Any], chat: bool) -> Fields:
    """Checks all fields but the prompt; raises ApiError that names the wrong one."""
    body = {name: value for name, value in body.items() if value is not None}
    known = OF_CHAT if chat else OF_COMPLETIONS
    for name, value in body.items():
        if name not in known:
            raise ApiError(400, f"{name!r:.60} is not a field of this endpoint; leave it out", str(name)[:60])
        fix = f"give {RENAMED[name]}" if name in RENAMED else "leave it out"
        if name in NEUTRAL and value not in NEUTRAL[name]:
            raise ApiError(400, f"{name}={value!r:.60} is not computed here; {fix}", name)
        if name == "functions" and value and body.get("function_call") != "none":
            raise ApiError(400, f"{name} are not computed here; {fix}", name)
    echo = take(body, "echo", bool, False)
    logprobs, top = _read_logprobs(body, chat)
    count = take(body, "n", int, 1, least=1, most=MOST_CHOICES)
    if take(body, "best_of", int, count) not in (0, count):  # 0, OpenAI's least, is no choice among more
        raise ApiError(400, f"best_of={body['best_of']} differs from n={count}, which is not computed; leave it out")
    tokens = take(body, "max_completion_tokens", int, None, least=0, most=MOST_TOKENS)
    default = tokens if chat else COMPLETION_TOKENS
    tokens = take(body, "max_tokens", int, default, least=0, most=MOST_TOKENS)
    options = take(body, "stream_options", dict, {})
    return Fields(
        body,
        take(body, "model", str, None),
        _read_sampling(body, tokens or 1, count),
        tokens,
        _read_stops(body),
        take(body, "stream", bool, False),
        take(options, "include_usage", bool, False),
        top,
        logprobs,
        echo,
    )


def take(body: dict, name: str, kind: type, default: Any, least: int | None = None, most: int | None = None) -> Any:
    """Returns a field of this type or its default; raises ApiError for other types and for values out of bounds."""
    value = body.get(name)
    if value is None:
        return default
    is_number = kind is float and type(value) in (int, float)
    if type(value) is not kind and not is_number:
        raise ApiError(400, f"{name} is {value!r:.60}; expected {_describe(kind)}", name)
    if (least is not None and not value >= least) or (most is not None and not value <= most):  # NaN is neither
        bounds = f"at least {least}" if most is None else f"{least} to {most}"
        raise ApiError(400, f"{name} is {value!r:.60}; expected {bounds}", name)
    return value


def _describe(kind: type) -> str:
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text", dict: "an object"}
    return names.get(kind, "a list")


def _read_logprobs(body: dict, chat: bool) -> tuple[bool, int]:
    """Returns whether log-probabilities are reported, and of how many most likely tokens."""
    if not chat:
        top = take(body, "logprobs", int, None, least=0, most=MOST_TOP)
        return top is not None, top or 0
    wanted = take(body, "logprobs", bool, False)
    top = take(body, "top_logprobs", int, 0, least=0, most=MOST_TOP)
    if top and not wanted:
        raise ApiError(400, f"top_logprobs={top} needs logprobs=true", "top_logprobs")
    return wanted, top


def _read_sampling(body: dict, tokens: int, samples: int) -> Sampling:
    """Returns the rules of `generate`, with OpenAI's defaults: temperature 1, and a new seed for each request."""
    kinds = {"top_k": int, "seed": int, "ignore_eos": bool}
    rules = {name: take(body, name, kinds.get(name, float), None) for name in SAMPLING}
    rules = {"temperature": 1.0, "seed": secrets.randbelow(2**31)} | {k: v for k, v in rules.items() if v is not None}
    if -(2**63) <= rules["seed"] < 2**63:
        rules["seed"] %= 2**31  # OpenAI's seeds have 64 bits and a sign; the answer has the one that draws
    for name in rules:
        try:
            Sampling(**{name: rules[name]})
        except (UsageError, OverflowError) as error:
            raise ApiError(400, str(error), name) from None
    return Sampling(tokens=tokens, samples=samples, **rules)


def _read_stops(body: dict) -> list[str]:
    stops = body.get("stop", [])
    stops = [stops] if isinstance(stops, str) else stops
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise ApiError(400, f"stop is {stops!r:.60}; expected text or a list of texts", "stop")
    if len(stops) > MOST_STOPS or any(len(stop) > 1000 for stop in stops):
        raise ApiError(400, f"stop has {len(stops)} texts; expected at most {MOST_STOPS} of 1000 characters", "stop")
    for stop in stops:
        try:
            stop.encode()
        except UnicodeEncodeError:
            raise ApiError(
                400, f"stop {stop!r:.60} has half of a character (a lone surrogate); remove it", "stop"
            ) from None
    return [stop for stop in stops if stop]


def read_prompts(body: dict, name: str = "prompt") -> Sequence[str | list[int]]:
    """Returns the prompts of a completion: a text, a list of ids, or a list of either."""
    prompt = body.get(name, "")
    if isinstance(prompt, str):
        return [prompt]
    if isinstance(prompt, list) and prompt:
        if all(isinstance(part, str) for part in prompt):
            return prompt
        if all(type(part) is int for part in prompt):
            return [prompt]
        if all(isinstance(part, list) and part and all(type(i) is int for i in part) for part in prompt):
            return prompt
    raise ApiError(400, f"{name} is {prompt!r:.60}; expected text, token ids, or a list of either", name)
