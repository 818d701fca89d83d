"""Every command in the README names what is there: a command, a preset, keys with values of their type."""

import re
import shlex
from pathlib import Path

import pytest

from shardformer import config, data, parsing, presets
from shardformer.bench import command_line, step_time
from shardformer.cli import commands, eval_command, sample_command
from shardformer.convert.command import ToGptj
from shardformer.convert.merge import Merging
from shardformer.errors import UsageError

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "README.md").read_text()
COMMANDS = sorted(set(re.findall(r"`python -m shardformer ([^`|]+)`", TEXT)))
OPTIONS = {"sample": sample_command.SampleOptions, "eval": eval_command.EvalOptions, "convert": ToGptj}


def check(line: str) -> None:
    command, *words = shlex.split(line)
    assert command in commands.COMMANDS, line
    overrides = [word for word in words if "=" in word]
    if command == "bench":
        assert words[0] in command_line.BENCHES, line
        overrides = [
            word for word in overrides if word.partition("=")[0] not in step_time.Measuring.__dataclass_fields__
        ]
    kind = Merging if any(word.startswith("merge_lora=") for word in words) else OPTIONS.get(command, config.Config)
    options = parsing.parse_overrides(overrides, kind)
    if command in ("train", "show") and words[0] != "--resume":
        presets.preset(words[0]).replace(**options)


@pytest.mark.parametrize("line", COMMANDS)
def test_command_is_understood(line):
    check(line)


def test_there_are_commands_and_a_wrong_one_is_noticed():
    assert len(COMMANDS) >= 10
    with pytest.raises(UsageError, match="layers"):
        check("train tiny layer=2")


def test_the_text_of_its_example_may_be_trained_on():
    corpus = data.load_corpus(str(ROOT / re.search(r" data=(shardformer/\S+)", TEXT)[1]))
    assert len(corpus.test) > 100


def test_scripts_and_files_exist():
    paths = re.findall(r"(?:bash |\(|`)((?:scripts|shardformer|tests|checkpoints)/[\w./]+)", TEXT)
    written_by_a_run = {path for path in paths if path.startswith("checkpoints/") and not path.endswith(".md")}
    missing = [path for path in set(paths) - written_by_a_run if not (ROOT / path).exists()]
    assert len(paths) > 5
    assert not missing
