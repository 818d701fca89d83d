"""`--help`: one page for all commands, and one page for each with its keys, defaults and meanings."""

import dataclasses
import shutil
import textwrap

from shardformer import config
from shardformer.cli.commands import COMMANDS, GROUPS, Command, load
from shardformer.config import parsing

WIDEST_KEY = 26
ENDING = """\
`COMMAND --help` lists what a command takes; `--version` prints the versions in use.
RUN is the folder of a run, such as checkpoints/tiny.
Exit status: 0 done, or stopped by a signal and saved; 1 the run failed; 2 the command was wrong."""


def format_overview() -> str:
    """Formats the page of all commands."""
    lines, longest = ["usage: python -m shardformer COMMAND ...", ""], max(map(len, COMMANDS))
    for title, names in GROUPS.items():
        lines += [title, *[f"  {name:<{longest}} {COMMANDS[name].summary}" for name in names], ""]
    return "\n".join([*lines, ENDING])


def format_command(name: str) -> str:
    """Formats the page of one command."""
    command = COMMANDS[name]
    first, *rest = command.usage
    lines = [f"usage: python -m shardformer {first}", *[f"       python -m shardformer {line}" for line in rest], ""]
    lines.append(f"{command.summary[0].upper()}{command.summary[1:]}.")
    if command.notes:
        lines += ["", textwrap.fill(command.notes, _width())]
    return "\n".join([*lines, *_option_lines(command)])


def _option_lines(command: Command) -> list[str]:
    lines: list[str] = []
    for path in command.options:
        options = load(path)
        for group in config.GROUPS if options is config.Config else [options]:
            lines += _group_lines(group)
    return lines


def _group_lines(group: type) -> list[str]:
    """Formats a title and the keys of a group: the keys that it declares, then the keys that it inherits."""
    lines = ["", (group.__doc__ or "").splitlines()[0].rstrip(".")]
    fields = dataclasses.fields(group)
    for field in sorted(fields, key=lambda field: field.name not in group.__annotations__):
        lines += _key_lines(field)
    return lines


def _key_lines(field: dataclasses.Field) -> list[str]:
    """Formats one key as '  lr=0.001     peak learning rate'; further lines are indented to the meaning."""
    printed = f"{parsing.flat_name(field)}={config.format_value(field, field.default)}"
    margin = " " * (WIDEST_KEY + 2)
    head = f"  {printed:<{WIDEST_KEY - 1}} " if len(printed) < WIDEST_KEY else f"  {printed}\n{margin}"
    choices = "|".join([*map(str, parsing.choices(field)), *["FILE.py:NAME"] * field.metadata.get("takes_code", False)])
    meaning = f"{choices}; {field.metadata['meaning']}" if choices else field.metadata["meaning"]
    lines = textwrap.wrap(meaning, _width() - len(margin), break_on_hyphens=False)
    return [head + lines[0], *[margin + line for line in lines[1:]]]


def _width() -> int:
    return max(60, min(shutil.get_terminal_size().columns, 120))
