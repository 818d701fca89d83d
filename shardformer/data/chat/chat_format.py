"""A chat template with its special tokens: of a tokenizer's folder, built in, or saved with a run."""

import dataclasses
import datetime
import hashlib
import json
import re
from pathlib import Path

from shardformer.errors import RunError, UsageError
from shardformer.files import read_text

FILE = "chat_template.json"  # of a run and of prepared data
JINJA, SETTINGS, TOKENS_MAP = "chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json"
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
DEFAULT, WITH_TOOLS = "default", "tool_use"  # in a list of templates, as transformers chooses them


@dataclasses.dataclass(frozen=True)
class ChatFormat:
    """A template and what it may name. `date` is the day that it reads as today, as the data must not change later."""

    name: str
    template: str
    tokens: dict[str, str] = dataclasses.field(default_factory=dict, hash=False)
    date: str = ""
    tool_template: str = ""  # for conversations with tools; empty: `template` serves them as well

    def choose_template(self, tools) -> str:
        """Returns the template for a conversation with or without tools."""
        return self.tool_template if self.tool_template and tools is not None else self.template

    def ignores_tools(self, tools) -> bool:
        """Returns whether a conversation has tools that its template does not read."""
        return bool(tools) and not re.search(r"\btools\b", self.choose_template(tools))

    @property
    def identity(self) -> str:
        """Returns a sha256 of what decides the text of a conversation."""
        templates = [self.template, self.tool_template]
        date = self.date if any("strftime_now" in template for template in templates) else ""
        return hashlib.sha256(json.dumps([templates, sorted(self.tokens.items()), date]).encode()).hexdigest()

    def documents(self) -> dict[str, str]:
        """Returns the files that keep the format: name to text."""
        return {FILE: json.dumps(dataclasses.asdict(self), indent=2) + "\n"}


def load_format(folder: Path) -> ChatFormat | None:
    """Loads the format of a run or of prepared data; None where it has none."""
    path = Path(folder) / FILE
    try:
        content = json.loads(read_text(path))
        result = ChatFormat(**{field.name: content[field.name] for field in dataclasses.fields(ChatFormat)})
        if not all(
            isinstance(value, str) for value in (result.name, result.template, result.date, result.tool_template)
        ):
            raise ValueError("its values are not strings")
        return result
    except FileNotFoundError:
        return None
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror}") from None
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(
            f"{path} is damaged ({type(error).__name__}: {error!s:.100}); every step_ folder of a run holds a copy"
        ) from None


def read_format(folder: Path) -> ChatFormat | None:
    """Returns the format of a tokenizer's folder as transformers finds it; None if it has no template."""
    settings = _read_object(folder / SETTINGS)
    alone, templates = _read_file(folder / JINJA), _read_templates(settings.get("chat_template"))
    if alone is not None:
        templates = {DEFAULT: alone}
    if DEFAULT not in templates:
        return None
    tokens = _find_tokens(_read_object(folder / TOKENS_MAP)) | _find_tokens(settings)
    return ChatFormat(str(folder), templates[DEFAULT], tokens, _today(), templates.get(WITH_TOOLS, ""))


def write_template(folder: Path, format: ChatFormat) -> None:
    """Writes the template into a tokenizer's folder, unless that has it; its file rules over tokenizer_config.json."""
    result = read_format(folder)
    if result is None or (result.template, result.tool_template) != (format.template, format.tool_template):
        (folder / JINJA).write_text(format.template, "utf-8")


def make_builtin(name: str, tokens: dict[str, str] | None = None) -> ChatFormat:
    """Returns a built-in format; raises UsageError for an unknown name."""
    if name not in TEMPLATES:
        raise UsageError(f"chat_template={name} is not built in; it takes auto, {', '.join(TEMPLATES)}")
    return ChatFormat(name, TEMPLATES[name], dict(tokens or {}), _today())


def resolve_format(wanted: str, stored: ChatFormat | None, tokenizer: str) -> ChatFormat:
    """Returns the format that chat_template= names; auto is `stored`, that of the tokenizer or the run."""
    if wanted == "auto":
        if stored is None:
            raise UsageError(
                f"tokenizer={tokenizer} has no chat template, neither in {JINJA} nor in {SETTINGS} beside it; name a "
                f"built-in one: chat_template={'|'.join(TEMPLATES)}"
            )
        return stored
    if stored is not None and stored.name == wanted:
        return stored  # of a run that goes on, with its date
    return make_builtin(wanted, stored.tokens if stored else None)


def _read_templates(value) -> dict[str, str]:
    """Returns the templates of `chat_template` by name: it is a text, or a list of named ones."""
    if isinstance(value, str):
        return {DEFAULT: value}
    entries = [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []
    named = [(entry.get("name"), entry.get("template")) for entry in entries]
    return {name: text for name, text in named if isinstance(name, str) and isinstance(text, str)}


def _find_tokens(settings: dict) -> dict[str, str]:
    """Returns the special tokens by name; a token is a text, or an object with its content."""
    result = {name: settings.get(name) for name in TOKEN_NAMES}
    strings = {name: value.get("content") if isinstance(value, dict) else value for name, value in result.items()}
    return {name: text for name, text in strings.items() if isinstance(text, str)}


def _read_object(path: Path) -> dict:
    text = _read_file(path)
    if text is None:
        return {}
    try:
        result = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{path} is not JSON: {error!s:.200}") from None
    return result if isinstance(result, dict) else {}


def _read_file(path: Path) -> str | None:
    try:
        return read_text(path)
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"{path} cannot be read: {error!s:.200}") from None


def _today() -> str:
    return datetime.date.today().isoformat()


CHATML = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message['role'] + '\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') + '<|im_end|>' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') + '<|im_end|>' -}}
{%- endif -%}
{{- '\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
"""

LLAMA3 = """\
{{- bos_token | default('<|begin_of_text|>') -}}
{%- for message in messages -%}
{%- set role = 'ipython' if message['role'] == 'tool' else message['role'] -%}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') | trim + '<|eot_id|>' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') | trim + '<|eot_id|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' -}}{%- endif -%}
"""

# For tokenizers without special tokens: characters, bytes, or a small BPE.
PLAIN = """\
{%- for message in messages -%}
{{- message['role'] + ': ' -}}
{%- if message['role'] == 'assistant' -%}
{% generation %}{{- (message['content'] or '') + '\\n\\n' -}}{% endgeneration %}
{%- else -%}
{{- (message['content'] or '') + '\\n\\n' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'assistant: ' -}}{%- endif -%}
"""

TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "plain": PLAIN}
