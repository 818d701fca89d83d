"""Writes the sources of the site into a folder: the READMEs, the pages beside this file, and what the code knows.

    python scripts/docs/stage.py FOLDER

A README becomes a page as it is; only its links change, as pages have other paths here. Keys and commands are listed
from the tables that `--help` prints. A link to a file that does not exist raises an error.
"""

import os
import re
import shutil
import sys
from dataclasses import fields
from pathlib import Path

from shardformer import config
from shardformer.analysis.explain import STOPS, small_model
from shardformer.analysis.pictures import draw_ring_steps, draw_split
from shardformer.cli.commands import COMMANDS, GROUPS, RUN_KEYS, Command, load
from shardformer.cli.help import format_overview
from shardformer.config import parsing
from shardformer.course.glossary import GLOSSARY

ROOT = Path(__file__).parents[2]
PAGES = Path(__file__).with_name("pages")
LINK = re.compile(r"(?P<text>!?\[(?:[^][]|\[[^]]*\])*\])\((?P<target>[^()#\s]*)(?P<anchor>#[^()\s]*)?\)")
FENCE = re.compile(r"^(```.*?^```)", re.MULTILINE | re.DOTALL)
EXAMPLES = "scripts/examples"
MARKER = ".staged"  # is in each folder that this program wrote, and may delete


def find_readmes() -> dict[str, str]:
    """Returns the page of each README and of the project's other texts, by their paths in the repository."""
    pages = {
        "README.md": "index.md",
        ".github/CONTRIBUTING.md": "project/contributing.md",
        ".github/CHANGELOG.md": "project/changelog.md",
        "shardformer/legacy/OWNERS.md": "guide/owners.md",
        EXAMPLES: "examples.md",  # written by `list_examples`
        "scripts/course": "guide/course.md",
    }
    for path in sorted([*ROOT.glob("shardformer/**/README.md"), *ROOT.glob("[cds]*/README.md")]):
        folder = path.parent.relative_to(ROOT).as_posix()
        inside = folder.removeprefix("shardformer/")
        pages[f"{folder}/README.md"] = f"guide/{inside}.md" if folder != inside else f"project/{folder}.md"
    return pages


def write_readmes(out: Path) -> None:
    """Writes the page of each README, and what the READMEs link to."""
    pages = find_readmes()
    for source, page in pages.items():
        if source.endswith(".md"):
            write(out / page, move_links((ROOT / source).read_text("utf-8"), source, page, pages, out))


def move_links(text: str, source: str, page: str, pages: dict[str, str], out: Path) -> str:
    """Returns the text of a file of the repository with the links of its page."""

    def move(link: re.Match) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if not target or ":" in target:
            return link[0]
        path = os.path.normpath(os.path.join(os.path.dirname(source), target))
        return f"{link['text']}({os.path.relpath(place(path, pages, out), os.path.dirname(page) or '.')}{anchor})"

    parts = FENCE.split(text)
    return "".join(part if part.startswith("```") else LINK.sub(move, part) for part in parts)


def place(path: str, pages: dict[str, str], out: Path) -> str:
    """Returns the path on the site of a file or folder of the repository, and copies a file that is no page."""
    if page := pages.get(path) or pages.get(f"{path}/README.md"):
        return page
    copy = out / "files" / path.removeprefix(".github/")
    copy.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(ROOT / path, copy)
    return copy.relative_to(out).as_posix()


def list_keys() -> str:
    """Returns the page of the keys of a run."""
    lines = ["# Keys of a run", "", "`train`, `show`, `plan`, `memory` and `verify` take them as `key=value`, ",
             "`Config.of` and `preset` as arguments. A key without an effect is rejected."]  # fmt: skip
    for group in config.GROUPS:
        title = title_of(group)
        lines += ["", f"## {title}", ""]
        for field in order_fields(group):
            lines += list_key(field, title)
    return "\n".join(lines)


def list_key(field, title: str) -> list[str]:
    """Returns the entry of one key: type, default, meaning, bounds and conditions that its group's title lacks."""
    default = config.format_value(field, field.default)
    rules = [rule for rule in describe_rules(field) if rule.lower().rstrip(".") not in title]
    return [
        f"```{{confval}} {parsing.flat_name(field)}",
        f"{describe_type(field)}; by default {f'`{default}`' if default else 'empty'}",
        "",
        " ".join([f"{capitalise(escape(field.metadata['meaning']))}.", *rules]),
        "```",
        "",
    ]


def describe_type(field) -> str:
    """Returns the values of a key, or its Python type."""
    values = [*map(str, parsing.choices(field)), *["FILE.py:NAME"] * field.metadata.get("takes_code", False)]
    kind = parsing.plain_type(field.type)
    other = f" or `{field.metadata['none']}`" if parsing.is_optional(field.type) else ""
    return (", ".join(f"`{value}`" for value in values) or f"`{kind.__name__}`") + other


def describe_rules(field) -> list[str]:
    """Returns sentences: the bounds of a key, what it needs, and whether a resume may change it."""
    data, sentences = field.metadata, []
    if data["least"] is not None:
        sentences.append(f"At least {data['least']}.")
    if data["below"] is not None:
        sentences.append(f"Below {data['below']}.")
    if data["needs"]:
        sentences.append(f"Needs {{confval}}`{data['needs']}`.")
    if data["used_if"]:
        sentences.append(f"Rejected {escape(data['used_if'].otherwise)}.")
    if parsing.flat_name(field) in config.FIXED_ON_RESUME:
        sentences.append("Cannot change on resume.")
    return sentences


def list_commands() -> str:
    """Returns the page of the commands, with the options that are not keys of a run."""
    lines = ["# Commands", "", "```text", format_overview(), "```"]
    for title, names in GROUPS.items():
        lines += ["", f"## {title}", ""]
        for name in names:
            lines += list_command(name, COMMANDS[name])
    return "\n".join(lines)


def list_command(name: str, command: Command) -> list[str]:
    """Returns the entry of one command: usage, notes and options."""
    usage = [f"python -m shardformer {line}" for line in command.usage]
    lines = [f"### {name}", "", f"{capitalise(escape(command.summary))}.", "", "```text", *usage, "```", ""]
    lines += [escape(command.notes), "", f"```{{program}} {name}", "```", ""]
    for path in command.options:
        if path == RUN_KEYS:
            lines += ["It also takes every [key of a run](keys.md).", ""]
            continue
        lines += [f"**{title_of(load(path))}**", ""]
        for field in order_fields(load(path)):
            values = f"{escape(', '.join(map(str, parsing.choices(field))))}: " if parsing.choices(field) else ""
            default = config.format_value(field, field.default)
            lines += [f"```{{option}} {parsing.flat_name(field)}={default}"]
            lines += [f"{values}{escape(field.metadata['meaning'])}.", "```", ""]
    return lines


def capitalise(text: str) -> str:
    return text[:1].upper() + text[1:]


def title_of(group: type) -> str:
    return (group.__doc__ or "").splitlines()[0].rstrip(".")


def order_fields(group: type) -> list:
    """Returns the keys that a group declares, then those that it inherits, as `--help` does."""
    return sorted(fields(group), key=lambda field: field.name not in group.__annotations__)


def escape(text: str) -> str:
    """Returns a plain text as Markdown; code between backticks stays."""
    parts = re.split(r"(`[^`]*`)", text)
    return "".join(part if part.startswith("`") else re.sub(r"([\\*_<>\[\]|#$])", r"\\\1", part) for part in parts)


def list_examples(out: Path) -> str:
    """Returns the page of the examples: each as its file, a notebook as a link to it."""
    lines = ["# Examples", "", "Each is one file, which a test runs.", ""]
    for path in sorted((ROOT / EXAMPLES).glob("*.py")):
        lines += [f"## {path.stem.replace('_', ' ').capitalize()}", "", f"`{EXAMPLES}/{path.name}`", ""]
        lines += ["````python", path.read_text("utf-8").rstrip(), "````", ""]
    for path in sorted((ROOT / EXAMPLES).glob("*.ipynb")):
        source = f"{EXAMPLES}/{path.name}"
        lines += [f"## {path.stem.capitalize()}", "", f"[`{source}`]({place(source, {}, out)})", ""]
    return "\n".join(lines)


def list_splits(out: Path) -> str:
    """Draws the slices of each way to split a model, and returns the text around the pictures."""
    lines: list[str] = []
    for title, (keys, meaning) in STOPS.items():
        name = title.replace(" ", "_")
        draw_split(small_model().replace(**keys), title, out / f"{name}.png")
        arguments = " ".join(f"{key}={value}" for key, value in keys.items())
        lines += [f"### {capitalise(title)}", "", f"`{arguments}`: {escape(meaning)}", ""]
        lines += [f"![The slices of each device: {title}]({name}.png)", ""]
    draw_ring_steps(4, out / "ring.png")
    return "\n".join(lines)


def list_words() -> str:
    """Returns the glossary of the course."""
    lines: list[str] = []
    for word, (meaning, picture) in GLOSSARY.items():
        lines += [f"### {capitalise(word)}", "", escape(meaning), "", "```text", picture.strip("\n"), "```", ""]
    return "\n".join(lines)


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text.rstrip() + "\n", "utf-8")


def stage(out: Path) -> None:
    """Writes all pages into a folder that is new, empty or of an earlier call, whose pages are deleted."""
    if out.exists() and any(out.iterdir()) and not (out / MARKER).exists():
        raise SystemExit(f"{out} has files that this program did not write; delete it, or name another folder")
    shutil.rmtree(out, ignore_errors=True)
    shutil.copytree(PAGES, out)
    (out / MARKER).touch()
    contents = (out / "index.md").read_text("utf-8")
    write_readmes(out)
    write(out / "index.md", f"{(out / 'index.md').read_text('utf-8')}\n{contents}")
    write(out / "examples.md", list_examples(out))
    write(out / "reference" / "keys.md", list_keys())
    write(out / "reference" / "commands.md", list_commands())
    sharding = out / "sharding.md"
    shutil.copy(ROOT / ".github" / "layer.png", out / "layer.png")
    write(sharding, sharding.read_text("utf-8").replace("<!-- splits -->", list_splits(out)))
    write(sharding, sharding.read_text("utf-8").replace("<!-- words -->", list_words()))


if __name__ == "__main__":
    stage(Path(sys.argv[1]))
