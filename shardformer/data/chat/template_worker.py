"""Renders one chat template in a separate process: its author is unknown, so it gets no files and little time.

`template_process.py` starts this file as a script. It imports nothing of shardformer. Requests and replies are lines
of JSON. Jinja's sandbox keeps a template away from Python; the limits of this process keep it from filling memory,
running forever, opening a file or starting a process.
"""

import contextlib
import datetime
import encodings
import functools
import importlib
import itertools
import json
import pkgutil
import resource
import signal
import sys

import jinja2
import jinja2.debug
import jinja2.ext
import jinja2.sandbox

MAX_MEMORY = 4 << 30  # bytes of address space


class TooMuchTime(Exception):
    """A rendering used its CPU seconds."""


class GenerationBlocks(jinja2.ext.Extension):
    """The tag {% generation %}, which marks the text of an assistant; its spans are collected in `spans`."""

    tags = {"generation"}  # noqa: RUF012 (jinja2 reads it from the class)

    def __init__(self, environment):
        super().__init__(environment)
        environment.generation_blocks = self
        self.written, self.spans, self.texts = 0, [], []

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller):
        text = caller()
        self.spans.append((self.written, self.written + len(text)))
        self.texts.append(text)
        return text


class SharedPrefixes(jinja2.ext.Extension):
    """The places of a rendered conversation where the renderings of its first messages end, found in one rendering.

    A rendering of the first n messages equals that of all messages until the template asks for message n. So it ends
    there with the text that follows the loop, provided that the template has neither asked for a later message nor for
    the number of messages before, and that the text after the loop is the same for all conversations.
    """

    def __init__(self, environment):
        super().__init__(environment)
        environment.shared_prefixes = self
        self.record: Record | None = None  # of a rendering of a watched template

    def watch_loop(self, tree):
        """Returns the tree with its loop over the messages watched; None if the text after it may depend on them."""
        nodes = jinja2.nodes
        loops = [number for number, node in enumerate(tree.body) if isinstance(node, nodes.For)]
        unclear = (nodes.Block, nodes.Extends, nodes.Include, nodes.Import, nodes.FromImport)
        if not loops or tree.find(unclear):
            return None
        before, loop, after = tree.body[: loops[-1]], tree.body[loops[-1]], tree.body[loops[-1] + 1 :]
        changing = {name.name for name in tree.find_all(nodes.Name) if name.ctx != "load"}
        changing |= {macro.name for macro in tree.find_all(nodes.Macro)} | {"messages"}
        read_after = {name.name for node in after for name in node.find_all(nodes.Name)}
        read_before = {name.name for node in [*before, loop] for name in node.find_all(nodes.Name)}
        if loop.else_ or read_after & changing or "add_generation_prompt" in read_before:
            return None
        loop.iter = self.call_method("_watch", [loop.iter])
        loop.body = [self._call("_begin_turn"), *loop.body, self._call("_end_turn")]
        tree.set_environment(self.environment)
        return tree.set_lineno(1)

    def _call(self, name):
        return jinja2.nodes.ExprStmt(self.call_method(name))

    def _watch(self, value):
        return value.iterate_turns() if isinstance(value, Watched) else value

    def _begin_turn(self):
        self.record.in_turn = True

    def _end_turn(self):
        self.record.in_turn = False


class Record:
    """What a template has asked for: the last message, and the length of the text when it asked for each."""

    def __init__(self, blocks):
        self.blocks, self.last, self.in_turn, self.ends = blocks, -1, False, {}


class Watched:
    """The messages from `first` on as a list that records which ones are asked for; fails for all unusual uses."""

    def __init__(self, messages: list, record: Record, first: int = 0):
        self.messages, self.record, self.first = messages, record, first

    def iterate_turns(self):
        """Yields the messages for the watched loop."""
        for number in itertools.count(self.first):
            if self.record.last < number and not self.record.in_turn:  # else `loop.last` asks in the turn before
                self.record.ends[number] = self.record.blocks.written
            if not self._ask_for(number):
                return
            yield self.messages[number]

    def _ask_for(self, number: int) -> bool:
        self.record.last = max(self.record.last, number)
        return number < len(self.messages)

    def __getitem__(self, key):
        if isinstance(key, slice) and key.stop is None and key.step is None and (key.start or 0) >= 0:
            return Watched(self.messages, self.record, self.first + (key.start or 0))
        if isinstance(key, int) and key >= 0:
            self._ask_for(self.first + key)
        else:
            self._ask_for(len(self.messages))
        return self.messages[self.first :][key]

    def __iter__(self):
        for number in itertools.count(self.first):
            if not self._ask_for(number):
                return
            yield self.messages[number]

    def __len__(self):
        self._ask_for(len(self.messages))
        return len(self.messages[self.first :])

    def __bool__(self):
        return self._ask_for(self.first)

    def __eq__(self, other):
        raise TypeError("not watched")

    def __repr__(self):
        raise TypeError("not watched")

    def __getattr__(self, name):
        raise TypeError("not watched")


class PlainDict:
    """`dict` for templates, without the attributes of the type."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class PlainNamespace(jinja2.utils.Namespace):
    """`namespace` for templates; names that begin with an underscore are rejected, as transformers does."""

    def __init__(*args, **kwargs):
        self, *args = args  # so that `namespace(self=...)` works
        values = dict(*args, **kwargs)
        for name in values:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")


def make_environment(now: str):
    """Returns the environment in which transformers renders chat templates; `now` fixes its clock."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, SharedPrefixes, jinja2.ext.loopcontrols]
    )

    def raise_exception(message):
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    def strftime_now(format):
        return (datetime.datetime.fromisoformat(now) if now else datetime.datetime.now()).strftime(format)

    environment.filters["tojson"] = tojson
    environment.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": strftime_now,
        "dict": PlainDict(),
        "namespace": PlainNamespace,
    }
    return environment


class Limits:
    """The CPU seconds and the characters of one rendering. All of a conversation may take three times the seconds."""

    def __init__(self, seconds: float, characters: int):
        self.seconds, self.characters = seconds, characters
        signal.signal(signal.SIGVTALRM, _raise_too_much_time)
        self.restart()

    def restart(self):
        """Begins another conversation."""
        self.end = _used_seconds() + 3 * self.seconds

    @contextlib.contextmanager
    def timed(self):
        """Raises TooMuchTime between two instructions; a long one in C ends the process a little later."""
        used = _used_seconds()
        if used >= self.end:
            raise TooMuchTime
        _set_limit(resource.RLIMIT_CPU, int(used + 2 * self.seconds) + 1)
        signal.setitimer(signal.ITIMER_VIRTUAL, min(self.seconds, self.end - used))
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


def _used_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def _raise_too_much_time(*_) -> None:
    raise TooMuchTime


def _set_limit(kind: int, value: int) -> None:
    _, hard = resource.getrlimit(kind)
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    with contextlib.suppress(ValueError, OSError):  # a system without this limit
        resource.setrlimit(kind, (value, hard))


def render(template, variables: dict, limits: Limits) -> dict:
    """Returns the text of a conversation and the spans of its generation blocks."""
    blocks = template.environment.generation_blocks
    blocks.written, blocks.spans, blocks.texts = 0, [], []
    parts = []
    for part in template.generate(**variables):
        parts.append(part)
        blocks.written += len(part)
        if blocks.written > limits.characters:
            raise jinja2.exceptions.TemplateError(f"its text has more than {limits.characters:,} characters")
    text = "".join(parts)
    for (start, end), marked in zip(blocks.spans, blocks.texts, strict=True):
        if text[start:end] != marked:  # a block inside a macro or {% set %} does not know its position
            raise jinja2.exceptions.TemplateError("a generation block is not where it is rendered; use no macro for it")
    return {"text": text, "spans": blocks.spans}


class Conversation:
    """The renderings of a request's conversation. `watched`: the template with a watched loop, None without one."""

    def __init__(self, template, watched, tokens: dict, request: dict, limits: Limits):
        self._template, self._watched, self._limits = template, watched, limits
        self._messages, self._renders = request["messages"], request["renders"]
        self._only_shared = request["measured"] == "shared"
        self._variables = tokens | request["options"] | {"tools": request["tools"], "documents": None}

    def render_all(self) -> list[dict]:
        """Returns one result for each requested rendering."""
        return [_guard(self._limits, functools.partial(self._render, *asked)) for asked in self._renders]

    def measure_prefixes(self) -> dict:
        """Returns the result of all messages, and the length of each requested rendering that is its beginning."""
        whole = _guard(self._limits, functools.partial(self._render, len(self._messages), False))
        if "error" in whole:
            return whole
        text, lengths = whole["text"], []
        ends, tails = self._find_ends(text) if len(self._renders) > 2 else ({}, {})
        for count, with_prompt in self._renders:
            if count in ends:
                start, tail = ends[count], tails[with_prompt]
                lengths.append(start + len(tail) if text.startswith(tail, start) else None)
                continue
            if self._only_shared:
                lengths.append(None)
                continue
            result = _guard(self._limits, functools.partial(self._render, count, with_prompt))
            if result.get("is_late"):
                return result
            is_prefix = "error" not in result and text.startswith(result["text"])
            lengths.append(len(result["text"]) if is_prefix else None)
        return whole | {"prefixes": lengths}

    def _find_ends(self, text: str) -> tuple[dict[int, int], dict[bool, str]]:
        """Returns where the renderings of the first messages end in the text, and what follows them.

        Both are empty if the rendering of a watched template differs.
        """
        if self._watched:
            record = Record(self._watched.environment.generation_blocks)
            self._watched.environment.shared_prefixes.record = record
            variables = self._choose_variables(Watched(self._messages, record), False)
            result = _guard(self._limits, functools.partial(render, self._watched, variables, self._limits))
            prompted = _guard(self._limits, functools.partial(self._render, len(self._messages), True)).get("text", "")
            end = record.ends.get(len(self._messages))
            if result.get("text") == text and end is not None and prompted.startswith(text[:end]):
                return record.ends, {False: text[end:], True: prompted[end:]}
        return {}, {}

    def _render(self, count: int, with_prompt: bool) -> dict:
        variables = self._choose_variables(self._messages[:count], with_prompt)
        return render(self._template, variables, self._limits)

    def _choose_variables(self, messages: "list | Watched", with_prompt: bool) -> dict:
        return self._variables | {"messages": messages, "add_generation_prompt": with_prompt}


def _guard(limits: Limits, act):
    """Returns what `act` gives, or its error as a result."""
    try:
        with limits.timed():
            return act()
    except TooMuchTime:
        limit = f"{limits.seconds:g} s, or {3 * limits.seconds:g} s for all prefixes of a conversation"
        return {"error": f"it takes more than {limit}", "is_late": True}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error!s:.300}"}


def _compile(environment, text: str) -> tuple:
    """Returns a template, and the same with a watched loop or None."""
    tree = environment.shared_prefixes.watch_loop(environment.parse(text))
    return environment.from_string(text), tree and environment.from_string(tree)


# Of filters, methods of strings and error handlers. `encodings` has one module for each name that `encode` accepts.
LATER_IMPORTS = ("html", "textwrap", "random", "unicodedata", "stringprep", "jinja2.constants")


def _import_everything(environment) -> None:
    """Renders and fails once: Python and jinja2 import some modules at their first use, and no file opens later."""
    for name in (*LATER_IMPORTS, *(f"encodings.{result.name}" for result in pkgutil.iter_modules(encodings.__path__))):
        with contextlib.suppress(ImportError):  # some encodings are those of another system
            importlib.import_module(name)
    environment.from_string("{{ '\\n' | tojson(indent=2) }}{{ strftime_now('%d %b') }}{{ [1] | pprint }}").render()
    for wrong in ("{% if %}", "{{ raise_exception('x') }}", "{{ ''.__class__ }}"):
        with contextlib.suppress(Exception):
            environment.from_string(wrong).render()


def main() -> None:
    """Reads the template, then requests, until the end of the input."""
    requests, replies = sys.stdin.buffer, sys.stdout.buffer

    def reply(content) -> None:
        replies.write(json.dumps(content).encode() + b"\n")
        replies.flush()

    setup = json.loads(requests.readline())
    limits = Limits(setup["seconds"], setup["characters"])
    environment = make_environment(setup["now"])
    _import_everything(environment)
    _set_limit(resource.RLIMIT_AS, MAX_MEMORY)
    for kind in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE, resource.RLIMIT_NPROC):
        _set_limit(kind, 0)
    limits.restart()
    results = [_guard(limits, functools.partial(_compile, environment, text)) for text in setup["templates"]]
    if errors := [result for result in results if isinstance(result, dict)]:
        reply(errors[0])
        return
    reply({})
    for line in requests:
        request = json.loads(line)
        if request["is_new"]:
            limits.restart()
        template, watched = results[0 if request["tools"] is None else -1]
        conversation = Conversation(template, watched, setup["tokens"], request, limits)
        reply(conversation.measure_prefixes() if request["measured"] else conversation.render_all())


if __name__ == "__main__":
    main()
