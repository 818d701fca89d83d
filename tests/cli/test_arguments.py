"""Unknown keys are rejected before a command is imported, and no key that a command takes is."""

import pytest

from shardformer.__main__ import _check_arguments
from shardformer.cli.arguments import check_keys
from shardformer.cli.commands import COMMANDS
from shardformer.cli.generation_options import EvalOptions
from shardformer.config import Config
from shardformer.errors import UsageError


@pytest.mark.parametrize(
    "words",
    [
        ["convert", "SHARDS", "DST", "seq=512", "step=3"],
        ["sweep", "base=HF", "data=x.txt", "lr=1e-3,3e-3", "ignore_config=x"],
        ["train", "--resume=RUN", "steps=3"],
        ["train", "base=HF", "ignore_config=x"],
        ["plan", "tiny", "chip=v4:2x2x2", "layers=3"],
        ["data", "prepare", "x/a=b.txt", "out=y"],
        ["sample", "RUN", "prompt=a=b"],
    ],
)
def test_keys_of_a_command_are_accepted(words):
    _check_arguments(COMMANDS[words[0]], words[1:])


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["convert", "SHARDS", "DST", "sequ=512"], "did you mean 'seq'"),
        (["train", "--resume=RUN", "stepz=3"], "did you mean 'steps'"),
        (["train", "base=HF", "lrr=3"], "did you mean 'lr'"),
        (["eval", "RUN", "splitt=all"], "did you mean 'split'"),
        (["explain", "picture=x"], "did you mean 'pictures'"),
        (["data", "show", "x", "tokeniser=y"], "did you mean 'tokenizer'"),
        (["serve", "RUN", "--port=3"], "did you mean 'port'"),
    ],
)
def test_unknown_key_names_the_closest(words, message):
    with pytest.raises(UsageError, match=message):
        _check_arguments(COMMANDS[words[0]], words[1:])


def test_path_with_an_equals_sign_is_no_key(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a=b.txt").touch()
    check_keys(["a=b.txt"], [EvalOptions, Config])
    with pytest.raises(UsageError, match="unknown key 'c'"):
        check_keys(["c=b.txt"], [EvalOptions, Config])
