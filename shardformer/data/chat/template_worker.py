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
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlocks, jinja2.ext.loopcontrols]
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
    """The CPU seconds and the characters of one rendering."""

    def __init__(self, seconds: float, characters: int):
        self.seconds, self.characters = seconds, characters
        signal.signal(signal.SIGVTALRM, _raise_too_much_time)

    @contextlib.contextmanager
    def timed(self):
        """Raises TooMuchTime between two instructions; a long one in C ends the process a little later."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        used = usage.ru_utime + usage.ru_stime
        _set_limit(resource.RLIMIT_CPU, int(used + 2 * self.seconds) + 1)
        signal.setitimer(signal.ITIMER_VIRTUAL, self.seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)


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


def answer(template, tokens: dict, request: dict, limits: Limits) -> list[dict]:
    """Returns one result for each requested rendering of a conversation."""
    results = []
    for count, with_prompt in request["renders"]:
        variables = tokens | request["options"] | {
            "messages": request["messages"][:count],
            "tools": request["tools"],
            "documents": None,
            "add_generation_prompt": with_prompt,
        }  # fmt: skip
        results.append(_guard(limits, functools.partial(render, template, variables, limits)))
    return results


def _guard(limits: Limits, act):
    """Returns what `act` gives, or its error as a result."""
    try:
        with limits.timed():
            return act()
    except TooMuchTime:
        return {"error": f"it takes more than {limits.seconds:g} s"}
    except MemoryError:
        return {"error": "it takes too much memory"}
    except RecursionError:
        return {"error": "it calls itself without end"}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error!s:.300}"}


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
    results = [_guard(limits, functools.partial(environment.from_string, text)) for text in setup["templates"]]
    if errors := [result for result in results if isinstance(result, dict)]:
        reply(errors[0])
        return
    reply({})
    for line in requests:
        request = json.loads(line)
        reply(answer(results[0 if request["tools"] is None else -1], setup["tokens"], request, limits))


if __name__ == "__main__":
    main()
