"""The formats in which models write tool calls, each recognised by its chat template."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from shardformer.inference.tool_calls.json_calls import Call, parse_json, parse_mistral
from shardformer.inference.tool_calls.python_calls import parse_python
from shardformer.inference.tool_calls.tagged_calls import (
    BAR,
    DEEPSEEK_BEGIN,
    DEEPSEEK_END,
    DEEPSEEK_SEP,
    parse_deepseek,
    parse_glm,
    parse_qwen_coder,
    read_values,
)


@dataclasses.dataclass(frozen=True)
class ToolFormat:
    """How the calls of an answer begin and end, and how the text between is read."""

    signs: tuple[str, ...]  # a template that has all of them writes calls in this format
    opening: str  # of calls
    closing: str = ""  # none: the answer ends with its calls
    parse: Callable[[str], list[Call]] = parse_json  # raises ValueError for a text that is no call
    quotes: str = '"'  # of strings, in which a closing ends no call
    has_texts: bool = False  # `parse` returns arguments as texts, which may stand for other values
    is_bare: bool = False  # an answer that begins with an object of JSON is a call, without an opening
    arguments: str = "arguments"  # their name in JSON
    forced: str = ""  # a prompt that ends with it is continued by a call as JSON
    marks: tuple[str, ...] = ()  # further texts that may be special tokens

    @property
    def special(self) -> tuple[str, ...]:
        """The texts that must not be dropped from an answer when they are special tokens."""
        return tuple(filter(None, (self.opening, self.closing, *self.marks)))

    def read(self, text: str, schemas: Mapping[str, Any]) -> list[Call]:
        """Returns the calls of a text; raises ValueError. schemas: of the arguments, by the names of functions."""
        calls = self.parse(text)
        return [read_values(call, schemas.get(call.name)) for call in calls] if self.has_texts else calls


# The first whose signs a template has: some have a sign of a later one too.
FORMATS = {
    "qwen_coder": ToolFormat(
        ("<function=", "<parameter="), "<tool_call>", "</tool_call>", parse_qwen_coder, quotes="", has_texts=True
    ),
    "glm": ToolFormat(
        ("<arg_key>", "<arg_value>"), "<tool_call>", "</tool_call>", parse_glm, quotes="", has_texts=True
    ),
    "deepseek": ToolFormat(
        (DEEPSEEK_BEGIN,),
        f"<{BAR}tool▁calls▁begin{BAR}>",
        f"<{BAR}tool▁calls▁end{BAR}>",
        parse_deepseek,
        marks=(DEEPSEEK_BEGIN, DEEPSEEK_SEP, DEEPSEEK_END),
    ),
    "hermes": ToolFormat(('"arguments"', "<tool_call>"), "<tool_call>", "</tool_call>", forced="<tool_call>\n"),
    "mistral": ToolFormat(
        ("[TOOL_CALLS]",), "[TOOL_CALLS]", parse=parse_mistral, forced="[TOOL_CALLS][", marks=("[ARGS]", "[CALL_ID]")
    ),
    "llama": ToolFormat(('"parameters": ', "ipython"), "<|python_tag|>", is_bare=True, arguments="parameters"),
    "lfm": ToolFormat(
        ("<|tool_call_start|>",),
        "<|tool_call_start|>",
        "<|tool_call_end|>",
        parse_python,
        quotes="'\"",
        forced="<|tool_call_start|>",
    ),
    "nemotron": ToolFormat(("<TOOLCALL>",), "<TOOLCALL>", "</TOOLCALL>", forced="<TOOLCALL>["),
}
JSON_ONLY = ToolFormat((), "", is_bare=True)  # of an answer that must be a call, and of other templates


def find_format(template: str) -> ToolFormat:
    """Returns the format of a chat template."""
    return next((each for each in FORMATS.values() if all(sign in template for sign in each.signs)), JSON_ONLY)
