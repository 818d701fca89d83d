"""`generate` and `score` on the command line."""

import io
import json

import pytest

from shardformer.__main__ import main
from shardformer.cli import record_output
from shardformer.cli.record_output import RecordOutput
from shardformer.cli.sample_command import open_codec
from shardformer.cli.text_options import TextOptions
from shardformer.errors import RunError
from shardformer.inference import prompts
from shardformer.inference.serve import engine
from shardformer.inference.serve.slot_programs import SlotPrograms
from shardformer.training.run_folder import Run
from tests import runs
from tests.inference import lm_eval_kinds
from tests.surroundings import before_call

USAGE = 2


@pytest.fixture(scope="module")
def run(tmp_path_factory, text):
    out = tmp_path_factory.mktemp("generate") / "run"
    assert runs.train("tiny", "mesh=4x2", f"data={text}", "steps=2", f"out={out}") == 0
    settings = out / "config.json"  # of a run that trained on devices with a kernel, which a CPU does not have
    settings.write_text(settings.read_text().replace('"attention": "auto"', '"attention": "fused"'))
    return out


@pytest.fixture(scope="module", autouse=True)
def share_programs():
    """Compiles the programs of a model and a number of rows once for all commands; they hold nothing of a run."""
    programs: dict = {}

    def share(model, rows):
        if (model.config, rows) not in programs:
            programs[model.config, rows] = SlotPrograms(model, rows)
        return programs[model.config, rows]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "SlotPrograms", share)
        yield


def generate(capsys, run, *words) -> list[dict]:
    capsys.readouterr()
    assert main(["generate", str(run), "tokens=6", *map(str, words)]) == 0
    return [json.loads(line) for line in capsys.readouterr().out.splitlines()]


@pytest.mark.slow
def test_texts_do_not_depend_on_batch_or_mesh(run, tmp_path, capsys):
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


@pytest.mark.slow
def test_bits_of_one_text_are_those_of_more_rows(run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The\n")
    rows = [generate(capsys, run, f"prompts={tmp_path / 'prompts'}", "logprobs=true", f"batch={n}") for n in (0, 16)]
    assert rows[0] == rows[1]


@pytest.mark.slow
def test_a_text_ends_before_its_stop_string(run, tmp_path, capsys):
    (tmp_path / "prompts").write_text("The\n")
    (free,) = generate(capsys, run, f"prompts={tmp_path / 'prompts'}")
    stop = free["text"][2:4]
    (row,) = generate(capsys, run, f"prompts={tmp_path / 'prompts'}", f"stop={json.dumps([stop, 'never there'])}")
    assert row["text"] == free["text"][: free["text"].find(stop)]
    assert row["finish"] == "stop"
    assert row["tokens"] == free["text"].find(stop) + 2


@pytest.mark.slow
def test_file_of_texts_is_continued(run, tmp_path, capsys, monkeypatch):
    prompts, out = tmp_path / "prompts", tmp_path / "texts.jsonl"
    prompts.write_text("The\nFrom\nthe\n")
    words = ["generate", str(run), f"prompts={prompts}", "tokens=6", "samples=2", "batch=2", f"out={out}"]
    assert main(words) == 0
    assert "6 of 6 texts" in capsys.readouterr().out
    complete = out.read_bytes()
    assert [json.loads(line)["prompt"] for line in complete.splitlines()] == [
        "The",
        "The",
        "From",
        "From",
        "the",
        "the",
    ]
    assert main(words) == USAGE
    assert "name another file" in capsys.readouterr().err
    out.unlink()

    def stop_after_three(output, *_):
        if output.done == 3:
            raise RunError("stopped")

    with monkeypatch.context() as patch:
        before_call(patch, RecordOutput, "write", stop_after_three)
        assert main(words) == 1
    out.write_bytes(out.read_bytes() + b'{"prompt": "Fr')  # as a killed process leaves it
    assert out.read_bytes().count(b"\n") == 3
    assert main([*words, "seed=1"]) == USAGE
    assert "was begun with seed=0, got 1" in capsys.readouterr().err
    assert main(words) == 0
    assert out.read_bytes() == complete
    assert [path.name for path in tmp_path.iterdir() if "settings" in path.name] == []


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
        ("batch must be at least 1", ["batch=-1"]),
        ("samples must be at most 65,536, got 100,000,000", ["samples=100000000"]),
        ("bos is one of auto, true, false; got 'maybe'", ["bos=maybe"]),
        ("bos=true: tokenizer=chars has no beginning of text", ["bos=true", "prompts={wrong}"]),
    ],
)
def test_invalid_prompts_and_options_are_rejected(run, tmp_path, capsys, message, words):
    (tmp_path / "empty").write_text("\n \n")
    (tmp_path / "wrong").write_text('{"text": "The"}\n')
    places = {"empty": tmp_path / "empty", "wrong": tmp_path / "wrong"}
    words = [word if "[" in word else word.format(**places) for word in words]
    capsys.readouterr()
    assert main(["generate", str(run), *words]) == USAGE
    error = capsys.readouterr().err
    assert message.replace("{{", "{").replace("}}", "}") in error
    assert error.count("\n") == 1


def test_an_endless_file_is_rejected(run, monkeypatch, capsys):
    monkeypatch.setattr(prompts, "MAX_TEXT", 1000)
    for words in (["generate", run, "prompts=/dev/zero"], ["score", run, "/dev/zero"]):
        assert main([str(word) for word in words]) == USAGE
        assert "/dev/zero has more than 1,000 characters" in capsys.readouterr().err
    assert main(["score", str(run), "~no_such_user/x"]) == USAGE
    assert "~no_such_user/x cannot be read: No such file" in capsys.readouterr().err


def test_json_is_escaped_for_other_encodings():
    """Python's escape of a letter that latin-1 lacks is not valid JSON."""
    for encoding, any_character in (("utf-8", True), ("latin-1", False), ("ascii", False)):
        stream = io.TextIOWrapper(io.BytesIO(), encoding=encoding)
        assert record_output.accepts_any_character(stream) == any_character
    assert record_output.accepts_any_character(io.StringIO())


def test_line_ends_of_a_text_are_kept(tmp_path):
    (tmp_path / "t").write_bytes(b"a\r\nb\rc")
    assert prompts.read_documents(str(tmp_path / "t")) == ["a\r\nb\rc"]


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """A run that was converted from a model with two ends and a template."""
    pytest.importorskip("tokenizers")
    folder = tmp_path_factory.mktemp("published")
    lm_eval_kinds.make_folder(KIND, folder / "hf")
    assert main(["convert", str(folder / "hf"), str(folder / "run")]) == 0
    return folder / "run"


KIND = lm_eval_kinds.KINDS["eos <|eot_id|>"]


def ids_of(run, text, **options):
    return open_codec(Run.open(run), TextOptions(**options)).encode(text)


@pytest.mark.slow
def test_a_published_model_stops_at_each_of_its_ends(published, tmp_path, capsys):
    (tmp_path / "prompts").write_text("the\n")
    words = (f"prompts={tmp_path / 'prompts'}", "samples=200", "temperature=5", "batch=64")
    rows = generate(capsys, published, *words)
    stopped = [row for row in rows if row["finish"] == "stop"]
    assert len(stopped) > 10
    assert not any(end in row["text"] for row in rows for end in KIND.ends)
    free = generate(capsys, published, *words, "ignore_eos=true")
    assert all(row["finish"] == "length" for row in free)
    ended = [[end in row["text"] for end in KIND.ends] for row in free]
    assert [any(some) for some in ended] == [row["finish"] == "stop" for row in rows]
    assert all(any(some[i] for some in ended) for i in range(2))  # both ends come up


def test_a_published_model_reads_prompts_as_its_tokenizer_does(published):
    begin, user = KIND.special.index("<|begin_of_text|>"), KIND.special.index("<|user|>")
    assert ids_of(published, "<|user|>the")[:2] == [begin, user]
    assert ids_of(published, "<|user|>the", bos="false")[0] == user
    assert user not in ids_of(published, "<|user|>the", special_tokens="false")


def test_score_follows_the_beginning_of_text(published, tmp_path, capsys):
    (tmp_path / "t.txt").write_text("the cat")
    found = []
    for bos in ("auto", "false"):
        capsys.readouterr()
        assert main(["score", str(published), str(tmp_path / "t.txt"), f"bos={bos}"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0]["tokens"] == found[1]["tokens"]
    assert found[0]["nats"] != pytest.approx(found[1]["nats"], abs=0.1)
