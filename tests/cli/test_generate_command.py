"""`generate` and `score` on the command line."""

import io
import json

import pytest

from shardformer.__main__ import main
from shardformer.cli import generate_command
from tests import runs

USAGE = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("generate") / "run"
    assert runs.train("tiny", "mesh=1x1", f"data={text}", "steps=2", f"out={out}") == 0
    settings = out / "config.json"  # of a run that trained on devices with a kernel, which a CPU does not have
    settings.write_text(settings.read_text().replace('"attention": "auto"', '"attention": "fused"'))
    return out


def generate(capsys, run, *words) -> list[dict]:
    capsys.readouterr()
    assert main(["generate", str(run), "tokens=6", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


def test_json_lines_that_do_not_depend_on_batch_or_mesh(run, tmp_path, capsys):
    prompts = tmp_path / "prompts.txt"
    prompts.write_text('The\n{"prompt": "a\\nb", "id": 7}\n\nFrom the\n')
    rows = generate(capsys, run, f"prompts={prompts}", "samples=2", "logprobs=true")
    assert [(row["prompt"], row["sample"]) for row in rows] == [
        (prompt, sample) for prompt in ("The", "a\nb", "From the") for sample in (0, 1)
    ]
    assert all(row["tokens"] == 6 == len(row["token_logprobs"]) and row["finish"] == "length" for row in rows)
    assert all(row["logprob"] == pytest.approx(sum(row["token_logprobs"]), abs=1e-4) for row in rows)
    others = generate(capsys, run, f"prompts={prompts}", "samples=2", "batch=3", "mesh=2x2")
    assert [row["text"] for row in others] == [row["text"] for row in rows]


def test_a_text_ends_before_its_stop_string(run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The\n")
    (free,) = generate(capsys, run, f"prompts={tmp_path / 'prompts'}")
    stop = free["text"][2:4]
    (row,) = generate(capsys, run, f"prompts={tmp_path / 'prompts'}", f"stop={json.dumps([stop, 'never there'])}")
    assert row["text"] == free["text"][: free["text"].find(stop)]
    assert row["finish"] == "stop"
    assert row["tokens"] == free["text"].find(stop) + 2


def test_score_adds_up(run, tmp_path, capsys):
    (tmp_path / "texts.jsonl").write_text('{"text": "The morning"}\n{"text": "of"}\n')
    capsys.readouterr()
    assert main(["score", str(run), str(tmp_path / "texts.jsonl")]) == 0
    *documents, total = map(json.loads, capsys.readouterr().out.splitlines())
    assert [row["document"] for row in (*documents, total)] == [1, 2, "all"]
    assert total["nats"] == pytest.approx(sum(row["nats"] for row in documents), abs=1e-3)
    assert (total["tokens"], total["bytes"]) == (11, 13)
    assert total["nats_per_byte"] == pytest.approx(total["nats"] / 13, abs=1e-5)
    (tmp_path / "null.jsonl").write_text('{"text": null}\n')
    assert main(["score", str(run), str(tmp_path / "null.jsonl")]) == USAGE
    assert 'null.jsonl, line 1: expected {"text": "..."}' in capsys.readouterr().err


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ("prompts=nowhere cannot be read: No such file", ["prompts=nowhere"]),
        ("prompts=~no_such_user/x cannot be read: No such file", ["prompts=~no_such_user/x"]),
        ("has no prompt; give one per line", ["prompts={empty}"]),
        ('line 1: expected {{"prompt": "..."}}, got', ["prompts={wrong}"]),
        ("stop takes a string or a JSON list of strings", ["stop=[1]"]),
        ("min_p must be in 0..1", ["min_p=2"]),
        ("batch must be at least 1", ["batch=0"]),
    ],
)
def test_wrong_prompts_and_options(run, tmp_path, capsys, message, words):
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "wrong").write_text('{"text": "The"}\n')
    places = {"empty": tmp_path / "empty", "wrong": tmp_path / "wrong"}
    words = [word if "[" in word else word.format(**places) for word in words]
    capsys.readouterr()
    assert main(["generate", str(run), *words]) == USAGE
    error = capsys.readouterr().err
    assert message.replace("{{", "{").replace("}}", "}") in error
    assert error.count("\n") == 1


def test_a_text_without_end(run, monkeypatch, capsys):
    monkeypatch.setattr(generate_command, "MAX_TEXT", 1000)
    for words in (["generate", run, "prompts=/dev/zero"], ["score", run, "/dev/zero"]):
        assert main([str(word) for word in words]) == USAGE
        assert "/dev/zero has more than 1,000 characters" in capsys.readouterr().err
    assert main(["score", str(run), "~no_such_user/x"]) == USAGE
    assert "~no_such_user/x cannot be read: No such file" in capsys.readouterr().err


def test_json_in_a_terminals_own_encoding():
    """The escape that Python prints for a letter that latin-1 lacks is none of JSON's."""
    for encoding, any_character in (("utf-8", True), ("latin-1", False), ("ascii", False)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert generate_command.takes_any_character(stream) == any_character
    assert generate_command.takes_any_character(io.StringIO())


def test_the_line_ends_of_a_text_are_kept(tmp_path):
    (tmp_path / "t").write_bytes(b"a\r\nb\rc")
    assert generate_command._read_documents(str(tmp_path / "t")) == ["a\r\nb\rc"]
