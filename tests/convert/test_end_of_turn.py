"""generation_config.json of a model that was trained on conversations: transformers must stop after a turn."""

import dataclasses
import json

import pytest

from shardformer.__main__ import main
from shardformer.convert.hf import copy_tokenizer
from shardformer.convert.hf_special_tokens import find_end_of_turn, write_generation_config
from shardformer.data import SpecialTokens
from shardformer.data.chat.chat_format import make_builtin
from shardformer.data.vocabulary import Bytes
from shardformer.training.run_folder import Run
from tests.data.chat.chats import write_lines
from tests.data.chat.walk import record, write_base

IM_END = 47  # of write_base's tokenizer, which has 46 letters and then <|im_start|>


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """Returns a run that has the chat template and the data of conversations."""
    folder = tmp_path_factory.mktemp("chat")
    write_base(folder / "base")
    write_lines(folder / "chat.jsonl", [record(n) for n in range(60)])
    words = [str(folder / "base"), str(folder / "run"), f"data={folder / 'chat.jsonl'}", "validation=0.2"]
    assert main(["convert", *words]) == 0
    return Run.open(folder / "run")


def test_tuned_folder_names_the_end_of_turn(run, tmp_path):
    assert main(["convert", str(run.out), str(tmp_path / "back"), "format=hf"]) == 0
    settings = json.loads((tmp_path / "back" / "generation_config.json").read_text())
    assert settings["eos_token_id"] == [2, IM_END]
    tokens = json.loads((tmp_path / "back" / "tokenizer.json").read_text())["added_tokens"]
    assert (tokens[1]["id"], tokens[1]["content"]) == (IM_END, "<|im_end|>")


def test_tokenizer_files_come_from_the_nearest_base(run, tmp_path):
    """After conversations and then preferences: the base of the base has them."""
    settings = run.config
    for name in ("tuned", "preferred"):
        (tmp_path / name).mkdir()
        settings = settings.replace(base=settings.run.out, out=str(tmp_path / name))
        (tmp_path / name / "config.json").write_text(settings.to_json())
    copy_tokenizer(dataclasses.replace(run, config=settings), tmp_path / "copied")
    assert (tmp_path / "copied" / "tokenizer_config.json").is_file()
    (tmp_path / "tuned" / "config.json").unlink()  # the chain ends here
    copy_tokenizer(dataclasses.replace(run, config=settings), tmp_path / "none")
    assert not (tmp_path / "none").exists()


def test_converted_model_keeps_its_published_ends(run, said):
    """The negative twin: the model has a chat template, but was not trained here."""
    assert find_end_of_turn(run) == IM_END
    assert find_end_of_turn(dataclasses.replace(run, fingerprint="")) is None
    assert not said


def test_end_of_turn_without_a_token_is_named(run, said):
    plain = run.vocabulary.with_chat(make_builtin("plain"))
    assert find_end_of_turn(dataclasses.replace(run, vocabulary=plain)) is None
    assert "give it to transformers: generate(..., stop_strings=['\\n\\n'])" in said[0]


@pytest.mark.parametrize(
    ("published", "written"),
    [
        ({"eos_token_id": 2, "top_k": 7}, {"eos_token_id": [2, IM_END], "top_k": 7}),
        ({"eos_token_id": [3, 2]}, {"eos_token_id": [3, 2, IM_END]}),
        ({"top_k": 7}, {"top_k": 7, "eos_token_id": [5, IM_END]}),
        (None, {"eos_token_id": [5, IM_END]}),
    ],
)
def test_end_of_turn_joins_the_published_ends(tmp_path, published, written):
    path = tmp_path / "generation_config.json"
    if published is not None:
        path.write_text(json.dumps(published))
    write_generation_config(tmp_path, SpecialTokens(ends=(5,)), Bytes(), IM_END)
    assert json.loads(path.read_text()) == written


def test_published_end_of_turn_changes_no_byte(tmp_path):
    path = tmp_path / "generation_config.json"
    path.write_text('{"eos_token_id": [47,2]}')
    write_generation_config(tmp_path, SpecialTokens(ends=(47, 2)), Bytes(), IM_END)
    assert path.read_text() == '{"eos_token_id": [47,2]}'
