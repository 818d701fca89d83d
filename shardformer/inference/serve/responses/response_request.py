"""The body of /v1/responses: the chat that it asks for, and what its answer repeats."""

import dataclasses
import json
import re
from typing import Any

from shardformer.config.sampling_keys import MOST_TOKENS
from shardformer.inference.serve.request_fields import IGNORED, SAMPLING, ApiError, take
from shardformer.inference.serve.responses.input_items import make_messages, read_items
from shardformer.inference.serve.responses.stored_responses import StoredResponses

# Fields that mean in a chat what they mean here; the last ones are further rules of `generate`.
SHARED = (
    "model", "stream", "parallel_tool_calls", "top_logprobs", "moderation", *SAMPLING, *IGNORED, "logit_bias",
    "presence_penalty", "frequency_penalty", "stop", "chat_template_kwargs",
)  # fmt: skip
OWN = (
    "input", "instructions", "max_output_tokens", "max_tool_calls", "previous_response_id", "reasoning", "text",
    "tool_choice", "tools", "include", "stream_options", "truncation", "background",
)  # fmt: skip
# Fields of OpenAI that are not computed, the values with which they change nothing, and what to do instead.
NEUTRAL: dict[str, tuple[tuple, str]] = {
    "background": ((False,), "ask without it, with stream=true if the answer takes long"),
    "conversation": ((), "give previous_response_id, or the conversation as input"),
    "prompt": ((), "give instructions and input"),
    "context_management": (([],), "leave it out"),
    "truncation": (("disabled", "auto"), "leave it out"),
}
MOST_CALLS = 300  # of functions in each other where an answer is encoded: the depth of JSON is what they leave
LOGPROBS = "message.output_text.logprobs"
# The first is computed, and the others would add to items that no answer of this server has.
INCLUDED = (
    LOGPROBS, "code_interpreter_call.outputs", "computer_call_output.output.image_url", "file_search_call.results",
    "message.input_image.image_url", "reasoning.encrypted_content", "web_search_call.action.sources",
    "web_search_call.results",
)  # fmt: skip
MOST_METADATA, LONGEST_KEY, LONGEST_VALUE = 16, 64, 512  # OpenAI's
RENAMED = {"messages": "input", "prompt": "input", "max_completion_tokens": "max_output_tokens",
           "max_tokens": "max_output_tokens", "response_format": "text.format"}  # fmt: skip
NAMES = re.compile(r"\A\w+|\b[a-z]+_\w+")  # of fields in an error: other words, such as messages, are words


@dataclasses.dataclass(frozen=True)
class ResponseRequest:
    """A checked request."""

    body: dict[str, Any]
    chat: dict[str, Any]  # the body of the chat that answers it
    conversation: bytes  # the messages of the chat as JSON, without instructions: a later one may have others

    @property
    def is_stored(self) -> bool:
        return self.body.get("store", True)

    def list_chats(self) -> list[dict[str, Any]]:
        """Returns the chats of which the first that fits the context is answered: each lacks more of the oldest turns.

        With truncation=auto, a chat may begin at any message of the user, after the system's at the beginning.
        """
        if self.body.get("truncation") != "auto":
            return [self.chat]
        messages = self.chat["messages"]
        roles = [message["role"] for message in messages]
        first = next((n for n, role in enumerate(roles) if role not in ("system", "developer")), 0)
        starts = [first, *(n for n, role in enumerate(roles) if role == "user" and n > first)]
        return [self.chat | {"messages": messages[:first] + messages[start:]} for start in starts]


def read_request(body: dict[str, Any], stored: StoredResponses) -> ResponseRequest:
    """Checks the fields that a chat does not have; raises ApiError that names the wrong one."""
    body = {name: value for name, value in body.items() if value is not None}
    for name, value in body.items():
        if name in NEUTRAL and value not in NEUTRAL[name][0]:
            raise ApiError(400, f"{name}={value!r:.60} is not computed here; {NEUTRAL[name][1]}", name)
        if name not in (*SHARED, *OWN, *NEUTRAL):
            raise ApiError(400, f"{name!r:.60} is not a field of this endpoint; leave it out", str(name)[:60])
    take(body, "store", bool, True)
    take(body, "max_tool_calls", int, None, least=0)  # of tools that run on OpenAI's servers
    take(body, "stream_options", dict, {})
    _check_metadata(take(body, "metadata", dict, {}))
    earlier = take(body, "previous_response_id", str, None)
    before = stored.find(earlier, "previous_response_id").read_messages() if earlier else ()
    messages = make_messages(read_items(body), before)
    conversation = _encode(messages, "input")
    instructions = take(body, "instructions", str, None)
    if instructions is not None:
        _encode(instructions, "instructions")
        messages.insert(0, {"role": "system", "content": instructions})
    if not messages:
        raise ApiError(400, "input has no message; give text or a list of items", "input")
    chat = {name: body[name] for name in SHARED if name in body} | _read_text(body) | _read_tools(body)
    chat |= {"messages": messages, "logprobs": _read_included(body) or take(body, "top_logprobs", int, 0) > 0}
    chat["max_completion_tokens"] = take(body, "max_output_tokens", int, None, least=1, most=MOST_TOKENS)
    chat["reasoning_effort"] = take(take(body, "reasoning", dict, {}), "effort", str, None)
    _check_depth(body)
    return ResponseRequest(body, chat, conversation)


def _encode(value: Any, name: str) -> bytes:
    """Returns JSON of a field; raises ApiError for half of a character, which no tokenizer takes."""
    try:
        return json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        lone = error.object[error.start]
        raise ApiError(400, f"{name} has {lone!r}, half of a character (a lone surrogate); remove it", name) from None


def _check_depth(body: dict[str, Any]) -> None:
    """Raises RecursionError if JSON of an answer, which repeats parts of the body, would."""
    repeated: Any = body
    for _ in range(MOST_CALLS):
        repeated = [repeated]
    json.dumps(repeated)


def rename_fields(error: ApiError) -> ApiError:
    """Returns an error about a field of the chat with the name that the field has here."""
    name = RENAMED.get(error.param or "")
    if name is None:
        return error
    message = NAMES.sub(lambda match: RENAMED.get(match[0], match[0]), str(error))
    return ApiError(error.status, message, name, error.code)


def _check_metadata(metadata: dict[str, Any]) -> None:
    good = all(isinstance(value, str) and len(value) <= LONGEST_VALUE for value in metadata.values())
    if not good or len(metadata) > MOST_METADATA or any(len(key) > LONGEST_KEY for key in metadata):
        raise ApiError(
            400, f"metadata is {metadata!r:.60}; expected at most {MOST_METADATA} texts of {LONGEST_VALUE} characters, "
            f"with names of {LONGEST_KEY}", "metadata",
        )  # fmt: skip


def _read_included(body: dict[str, Any]) -> bool:
    """Returns whether log-probabilities are to be included."""
    included = take(body, "include", list, [])
    if unknown := [name for name in included if name not in INCLUDED]:
        raise ApiError(400, f"include has {unknown[0]!r:.60}; expected {', '.join(INCLUDED)}", "include")
    return LOGPROBS in included


def _read_text(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields of a chat for the form of the text."""
    text = take(body, "text", dict, {})
    form = take(text, "format", dict, {"type": "text"})
    if form.get("type") == "json_schema":
        form = {"type": "json_schema", "json_schema": {name: form[name] for name in form if name != "type"}}
    return {"response_format": form, "verbosity": take(text, "verbosity", str, None)}


def _read_tools(body: dict[str, Any]) -> dict[str, Any]:
    """Returns the functions and the choice among them as a chat has them."""
    tools = []
    for n, tool in enumerate(take(body, "tools", list, [])):
        kind = tool.get("type") if isinstance(tool, dict) else None
        if kind != "function":
            raise ApiError(
                400, f"tools has {tool!r:.60} at {n}; expected the type function: others do not run here", "tools"
            )
        function = {name: tool[name] for name in ("name", "description", "parameters", "strict") if name in tool}
        tools.append({"type": "function", "function": function})
    choice = body.get("tool_choice", "auto")
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        choice = {"type": "function", "function": {"name": choice.get("name")}}
    return {"tools": tools, "tool_choice": choice}
