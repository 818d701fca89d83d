"""Renders conversations in a separate process, which runs `template_worker.py`."""

import dataclasses
import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

from shardformer.child_process import make_environment
from shardformer.data.chat.chat_format import ChatFormat
from shardformer.data.chat.conversations import Conversation, with_text_arguments
from shardformer.data.chat.letters import make_guard
from shardformer.errors import UsageError

WORKER = Path(__file__).with_name("template_worker.py")
SECONDS = 20.0  # of CPU for one rendering, and a third of those for all renderings of one conversation
MAX_TEMPLATE = 1 << 18  # characters; published ones have 20,000
CHARACTERS = 64 << 20  # of one rendering
OLDEST = (3, 1, 6)  # of jinja2: older versions have known sandbox escapes
Result = TypeVar("Result")


@dataclasses.dataclass(frozen=True)
class Rendered:
    """The text of a conversation, and the spans of its {% generation %} blocks."""

    text: str
    spans: tuple[tuple[int, int], ...]


class RenderError(UsageError):
    """A template that fails for a conversation."""

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.cause = f"the chat template fails: {reason:.80}"


def render_either_form(render: Callable[[Conversation], Result], conversation: Conversation) -> Result:
    """Renders tool calls with arguments as objects; if the template fails, as the text of JSON."""
    try:
        return render(conversation)
    except RenderError as error:
        as_text = with_text_arguments(conversation)
        if as_text.messages == conversation.messages:
            raise
        try:
            return render(as_text)
        except RenderError:
            raise error from None


class TemplateProcess:
    """One chat template in a process without files and with limits of time, memory and output."""

    def __init__(
        self,
        format: ChatFormat,
        seconds: float = SECONDS,
        characters: int = CHARACTERS,
        now: bool = False,
        letters: Sequence[str] = (),
    ):
        """Starts the process. strftime_now gives the format's date; now=True gives the present time.

        letters: special tokens that are only letters in messages, see `letters.py`.
        """
        check_package()
        for text in (format.template, format.tool_template):
            if len(text) > MAX_TEMPLATE:
                raise UsageError(
                    f"the chat template of {format.name} has {len(text):,} characters, more than the {MAX_TEMPLATE:,} "
                    "of any template; give another one: chat_template=NAME"
                )
        self.format, self._guard = format, make_guard(letters)
        # -P keeps this folder out of sys.path, where its modules would hide modules of the same names.
        command = [sys.executable, "-P", str(WORKER)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, env=make_environment(), stdin=pipe, stdout=pipe, stderr=pipe)
        templates = [format.template, *([format.tool_template] if format.tool_template else [])]
        setup = {"templates": templates, "tokens": format.tokens, "seconds": seconds, "characters": characters}
        if error := self._ask(setup | {"now": "" if now else format.date}).get("error"):
            self.close()
            raise UsageError(f"the chat template of {format.name} is rejected: {error}")

    def __enter__(self) -> "TemplateProcess":
        return self

    def __exit__(self, *_) -> None:
        self.close()

    @property
    def is_alive(self) -> bool:
        return self._process.poll() is None

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def guard(self, conversation: Conversation) -> Conversation:
        """Returns the conversation to be rendered, in whose texts special tokens stay letters."""
        messages, tools = self._guard([conversation.messages, conversation.tools])
        return dataclasses.replace(conversation, messages=messages, tools=tools)

    def measure_prefixes(
        self,
        conversation: Conversation,
        prefixes: list[tuple[int, bool]],
        only_shared: bool = False,
        is_new: bool = True,
    ) -> tuple[Rendered, list[int | None]]:
        """Renders a conversation, and measures the renderings of prefixes if the text begins with them, else None.

        A prefix is a number of messages, and whether the prompt of the next turn follows. only_shared: None also for a
        prefix that needs a rendering of its own. Not is_new: in the time that is left. Raises RenderError.
        """
        result = self._request(conversation, prefixes, is_new, measured="shared" if only_shared else "all")
        return self._read(result), result["prefixes"]

    def render_again(self, conversation: Conversation, prefixes: list[tuple[int, bool]]) -> list[str]:
        """Renders prefixes of a variant of the last conversation, in the time that is left; raises RenderError."""
        return [self._read(result).text for result in self._request(conversation, prefixes, is_new=False)]

    def render(self, conversation: Conversation, with_prompt: bool = False) -> Rendered:
        """Renders a conversation; raises RenderError."""
        [result] = self._request(conversation, [(len(conversation.messages), with_prompt)])
        return self._read(result)

    def _request(
        self, conversation: Conversation, prefixes: list[tuple[int, bool]], is_new: bool = True, measured: str = ""
    ) -> Any:
        messages = conversation.messages
        if "developer" not in self.format.choose_template(conversation.tools):
            # OpenAI's later name of system messages, which an older template would leave out.
            messages = [m | {"role": "system"} if m["role"] == "developer" else m for m in messages]
        request = {
            "messages": messages,
            "tools": conversation.tools,
            "options": conversation.options,
            "renders": prefixes,
            "is_new": is_new,
            "measured": measured,
        }
        return self._ask(request)

    def _read(self, result: dict) -> Rendered:
        if "error" in result:
            reason = result["error"]
            raise RenderError(f"the chat template of {self.format.name} fails: {reason}", reason)
        return Rendered(result["text"], tuple((start, end) for start, end in result["spans"]))

    def _ask(self, request: dict) -> Any:
        requests, replies = self._process.stdin, self._process.stdout
        assert requests is not None
        assert replies is not None
        try:
            requests.write(json.dumps(request).encode() + b"\n")
            requests.flush()
            line = replies.readline()
        except BrokenPipeError:
            line = b""
        if not line.endswith(b"\n"):
            self._process.kill()
            reason = self._process.communicate()[1].decode(errors="replace").strip().rpartition("\n")[2]
            raise UsageError(
                f"the chat template of {self.format.name} is rejected: its process ended, so it takes too much time or "
                f"memory{reason and f' ({reason:.200})'}; give another one: chat_template=NAME"
            )
        return json.loads(line)


def check_package() -> None:
    """Raises UsageError without a safe version of jinja2."""
    if not importlib.util.find_spec("jinja2"):
        raise UsageError("chat data needs the package jinja2; install it: pip install jinja2")
    version = importlib.metadata.version("jinja2")
    if tuple(int(part) for part in version.split(".")[:3] if part.isdecimal()) < OLDEST:
        oldest = ".".join(map(str, OLDEST))
        raise UsageError(f"chat data needs jinja2 {oldest} or newer, got {version}; update it: pip install -U jinja2")
