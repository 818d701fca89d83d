"""Every command in the README and the tour of the commands is valid; the quick ones run, on small models."""

import re
import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from shardformer import Config, Session
from shardformer.__main__ import main
from shardformer.bench import command_line
from shardformer.cli import commands
from shardformer.config import parsing, presets
from shardformer.errors import UsageError
from tests import runs

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
# The tour of the commands comes first, as the README uses a run that the tour trains.
TEXT = (ROOT / "shardformer" / "cli" / "README.md").read_text() + README
FOUND = re.findall(r"^python -m shardformer ([^#\n]+?) *(?:#.*)?$", TEXT, re.MULTILINE)
FOUND += re.findall(r"`python -m shardformer (\w[^`|]+)`", TEXT)
COMMANDS = sorted(set(FOUND))
# Keys that replace or extend those of a README command.
SMALL = {"layers": 1, "d_model": 32, "seq": 16, "eval_batches": 1, "data": "text.txt", "steps": 2, "decay_steps": 3}
SHORTER = {
    "train": SMALL | {"mesh": "1x1"},
    "train --resume": {"steps": 3},
    "sweep": SMALL | {"mesh": "1x1", "steps": 4, "decay_steps": 4, "eval_every": 2, "seeds": 1},
    "sample": {"tokens": 3},
    "generate": {"tokens": 3},
    "eval": {"mesh": "1x1"},
}
# These have tests of their own: tests/bench, tests/analysis, tests/legacy, tests/data/test_shakespeare.py.
NOT_RUN = (
    "bench ",
    "plan ",
    "memory ",
    "verify ",
    "explain",
    "diff ",
    "legacy SCRIPT.py",
    "legacy --migrate",
    "data import",
    "harness ",  # needs lm-eval
    "serve ",  # ends with a signal; tests/cli/test_serve_command.py
)


def check(line: str) -> None:
    command, *words = shlex.split(line)
    assert command in commands.COMMANDS, line
    if command == "sweep":  # a key may have several values
        commands.load(commands.COMMANDS[command].check)(words)
        return
    kinds = [commands.load(place) for place in commands.COMMANDS[command].options]
    if command == "bench":
        assert words[0] in command_line.BENCHES, line
    given = {kind: [] for kind in kinds}
    for word in (word for word in words if "=" in word):
        key = word.partition("=")[0]
        others = Config if Config in kinds else kinds[-1]
        given[next((kind for kind in kinds if key in kind.__dataclass_fields__), others)].append(word)
    parsed = {kind: parsing.parse_overrides(overrides, kind) for kind, overrides in given.items()}
    if command in ("train", "show") and words[0] in presets.PRESETS:
        presets.preset(words[0]).replace(**parsed[Config])


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line):
    check(line)


def test_tour_has_every_command():
    toured = {line.split()[0] for line in COMMANDS}
    assert not set(commands.COMMANDS) - toured, "add them to shardformer/cli/README.md"


def combine(lines: list[str]) -> list[list[str]]:
    """The words of each command; training runs that no other command reads are one where their keys go together.

    Each run compiles programs of its own, and test_command_is_understood has looked at each line by itself.
    """
    found, open_to_more = [], []
    for line in lines:
        command, preset, *words = *shlex.split(line), ""
        words = [word for word in words if word and not word.startswith("steps=")]
        out = next((word for word in words if word.startswith("out=")), "")
        if command != "train" or not out or any(out.removeprefix("out=") in other for other in lines if other != line):
            found.append(shlex.split(line))
            continue
        for run in open_to_more:
            both = [*run, *(word for word in words if word not in (out, *run))]
            if run[1] == preset and go_together(preset, both[2:]):
                run[:] = both
                break
        else:
            open_to_more.append([command, preset, *words])
            found.append(open_to_more[-1])
    return found


def go_together(preset: str, words: list[str]) -> bool:
    try:
        return bool(presets.preset(preset).replace(**parsing.parse_overrides(words, Config)))
    except UsageError:
        return False


def shorten(words: list[str]) -> list[str]:
    """Returns a command with keys that make it quick; it keeps its other keys, and two of several values to try."""
    shorter = SHORTER.get("train --resume" if "--resume" in words else words[0], {})
    kept = [word for word in words if word.partition("=")[0] not in {"steps", "tokens", "seq", "seeds"}]
    if words[0] in ("sweep", "coordinates"):
        kept = [",".join(word.split(",")[:2]) for word in kept]
    given = {word.partition("=")[0] for word in kept if "=" in word}
    return [*kept, *(f"{key}={value}" for key, value in shorter.items() if key not in given)]


@pytest.mark.slow
def test_the_commands_run(tmp_path, monkeypatch, text):
    """In the README's order, as a reader would type them: later ones use what earlier ones have left."""
    monkeypatch.chdir(tmp_path)
    runs.share_trainers(monkeypatch)  # for the sweep, whose halvings resume runs of the same programs
    (tmp_path / "shardformer").symlink_to(ROOT / "shardformer" / "shards")  # a small folder of source
    for name in ("text.txt", "other.txt"):
        (tmp_path / name).write_text(text.read_text())
    (tmp_path / "prompts.txt").write_text("ROMEO:\nThe king\n")
    lines = [line for line in dict.fromkeys(FOUND) if not line.startswith(NOT_RUN)]
    assert len(lines) > 15
    for given in combine(lines):
        command, *words = shorten(given)
        status = runs.train(*words) if command == "train" else main([command, *words])
        assert status == 0, given


def test_failing_command_is_noticed(tmp_path, monkeypatch):
    """The twin: what its command needs is not there."""
    monkeypatch.chdir(tmp_path)
    assert main(shorten(["eval", "checkpoints/shakespeare_cpu", "split=test"])) == 2


def test_wrong_command_is_noticed():
    assert len(COMMANDS) >= 10
    with pytest.raises(UsageError, match="layers"):
        check("train tiny layer=2")


def test_readme_fits_one_page():
    assert len(README.splitlines()) <= 60
    assert max(map(len, README.splitlines())) <= 120


def run_python_example() -> None:
    (example,) = re.findall(r"```python\n(.*?)```", README, re.DOTALL)
    exec(compile(example, "README.md", "exec"), {})


def test_python_example_is_accepted(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(Session, "train", lambda session: SimpleNamespace(best=session.run.config.training.steps))
    run_python_example()
    assert capsys.readouterr().out.splitlines()[-1] == "20"


@pytest.mark.slow
def test_python_example_runs(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run_python_example()
    best = re.fullmatch(r"Best\(step=20, val_loss=(.*)\)", capsys.readouterr().out.splitlines()[-1])
    assert 2.0 < float(best[1]) < 4.0  # an untrained model has ln(65) = 4.17


def missing_paths(paths: list[str]) -> list[str]:
    """Returns the paths that do not exist, of those that no run writes."""
    written_by_a_run = {path for path in paths if path.startswith("checkpoints/") and not path.endswith(".md")}
    return sorted(path for path in set(paths) - written_by_a_run if not (ROOT / path).exists())


def tables_of(page: str) -> list[tuple[str, str]]:
    """Returns the tables that a page names, with their files."""
    return re.findall(r"`([A-Z_]{5,})`[^`]{1,9}`((?:shardformer|tests)/[\w./]+\.py)`", page)


def missing_tables(tables: list[tuple[str, str]]) -> list[str]:
    """Returns the tables that their files do not define."""
    return [table for table, path in tables if not re.search(rf"^{table}\b", (ROOT / path).read_text(), re.M)]


def test_scripts_and_files_exist():
    paths = re.findall(r"(?:bash |\(|`)((?:scripts|shardformer|tests|checkpoints|\.github)/[\w./]+)", TEXT)
    assert len(paths) > 5
    assert missing_paths(paths) == []


def test_contributing_names_files_and_tables_that_exist():
    page = (ROOT / ".github" / "CONTRIBUTING.md").read_text()
    paths = set(re.findall(r"`((?:shardformer|tests|scripts)/[\w./]+)`", page))
    assert len(paths) > 20
    assert missing_paths([path for path in paths if "NAME" not in path]) == []
    assert len(tables_of(page)) >= 8
    assert missing_tables(tables_of(page)) == []


def test_missing_file_or_table_is_noticed():
    assert missing_paths(["shardformer/no_such.py", "shardformer/config", "checkpoints/run"]) == [
        "shardformer/no_such.py"
    ]
    page = "`TABLE` in `shardformer/errors.py`, `LAYERS` in `tests/test_imports.py`"
    assert missing_tables(tables_of(page)) == ["TABLE"]
