"""Rows that cannot be trained on: all causes are reported at once, or the rows are skipped and counted."""

import json

import pytest

from shardformer import load_corpus
from shardformer.__main__ import main
from shardformer.data.chat.chat_files import read_conversations
from shardformer.data.row_report import MAX_CAUSES, RowError, RowReport
from shardformer.errors import UsageError
from tests import runs, shared
from tests.data.chat.chats import records, template, write_lines

BAD = [
    {"messages": [{"role": "bot", "content": "x"}]},
    {"messages": []},
    {"messages": [{"role": "bot", "content": "y"}]},
]


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))


def load(path, **options):
    settings = {"data": str(path), "tokenizer": "bytes", "chat_template": "plain", "seq": 128, "vocab": 257}
    return load_corpus(shared.tiny(**settings | {"documents": "masked"} | options))


def test_all_causes_come_at_once(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [*records(20), *BAD])
    with pytest.raises(UsageError) as caught:
        load(path)
    message = str(caught.value)
    lines = message.split("\n")
    assert lines[0] == "3 rows cannot be learned; correct them, or leave such rows out: bad_rows=skip"
    assert lines[1].startswith(f"  - 2 rows; the first: {path}, line 21, message 1, has the role 'bot'; expected ")
    assert lines[2:] == [f"  - 1 row; the first: {path}, line 22, has no messages; remove the row"]


def test_skipped_rows_are_counted_by_cause(tmp_path, said):
    good = write_lines(tmp_path / "good.jsonl", records(20))
    path = write_lines(tmp_path / "chat.jsonl", [*BAD, *records(20)])
    corpus = load(path, bad_rows="skip")
    assert [line for line in said if "left out (bad_rows=skip): 3 rows: 2 x role 'bot'" in line]
    kept, expected = (sum(len(s.tokens) for s in c.splits("train")) for c in (corpus, load(good)))
    assert kept == expected


def test_skipping_does_not_serve_a_later_stop(tmp_path):
    path = write_lines(tmp_path / "chat.jsonl", [*BAD, *records(20)])
    load(path, bad_rows="skip")
    with pytest.raises(UsageError, match="3 rows cannot be learned"):
        load(path)


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_records_of_texts_follow_the_same_rule(tmp_path, tokenizer):
    lines = [json.dumps({"text": f"some words {n} " * 9}) for n in range(40)]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join([*lines, '{"text": 3}', "{", '{"body": "x"}']))
    options = {"chat_template": "auto", "tokenizer": tokenizer, "vocab": 0}
    with pytest.raises(
        UsageError, match=r"(?s)3 rows cannot be.* 1 row; .* has a text of int; expected text.* 1 row; .* is not JSON"
    ):
        load(path, **options)
    load(path, bad_rows="skip", **options)


def test_records_in_utf16_are_named(tmp_path):
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"text": f"some words {n} " * 9}) + "\n" for n in range(40)), "utf-16")
    with pytest.raises(UsageError, match=r"text.jsonl, line 1, is not UTF-8: invalid start byte; convert it, for"):
        load(path, chat_template="auto")


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe:300"])
@pytest.mark.parametrize(
    ("make", "keys"),
    [
        (lambda text: {"text": text}, {"chat_template": "auto"}),
        (lambda text: {"prompt": text, "completion": "a"}, {"chat_template": "auto"}),
        (lambda text: {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "a"}]}, {}),
        (lambda text: {"chosen": text, "rejected": "no"}, {"chat_template": "auto", "objective": "dpo"}),
    ],
    ids=["text", "prompt", "chat", "pair"],
)
def test_half_a_character_is_a_bad_row(tmp_path, make, keys, tokenizer, said):
    texts = [*(f"some words {n} " * 9 for n in range(40)), "half \ud83d"]
    path, options = tmp_path / "rows.jsonl", {"tokenizer": tokenizer, "vocab": 0} | keys
    path.write_text("\n".join(json.dumps(make(text)) for text in texts))
    message = r"rows.jsonl, line 41, has '\\ud83d', half of a character .* remove it; .* bad_rows=skip"
    with pytest.raises(UsageError, match=message):
        load(path, **options)
    load(path, bad_rows="skip", **options)
    assert [line for line in said if "1 row: 1 x half of a character" in line]


@pytest.mark.parametrize("tokenizer", ["bytes", "chars"])
def test_faults_of_all_sources_come_at_once(tmp_path, tokenizer):
    paths = []
    for name, fault in (("a", {"body": "x"}), ("b", "{"), ("held", {"text": 3})):
        lines = [json.dumps({"text": f"some words {n} " * 9}) for n in range(40)]
        paths.append(tmp_path / f"{name}.jsonl")
        paths[-1].write_text("\n".join([*lines, fault if isinstance(fault, str) else json.dumps(fault)]))
    a, b, held = paths
    options = {"chat_template": "auto", "tokenizer": tokenizer, "vocab": 0, "validation": str(held)}
    with pytest.raises(
        UsageError, match=r"(?s)3 rows cannot be learned.* 1 row; .* has no text.* 1 row; .* is not JSON"
    ):
        load(f"{a},{b}", **options)


def test_prompts_that_are_no_text_are_named(tmp_path):
    lines = [{"prompt": f"a{n}", "completion": "b"} for n in range(40)]
    path = write_lines(
        tmp_path / "a.jsonl", [*lines, {"prompt": 3, "completion": "x"}, {"prompt": "", "completion": []}]
    )
    with pytest.raises(UsageError, match=r"(?s)1 row; .*line 41, has a prompt of int.*1 row; .* a completion of list"):
        load(path, chat_template="auto")


def test_each_reason_of_a_template_is_a_cause(tmp_path):
    strict = template(
        "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
        "{% for m in messages %}{{ raise_exception('no tools') if m.role == 'tool' }}{{ m.role }}: {{ m.content }}\n"
        "{% endfor %}"
    )
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    faults = [[{"role": "system", "content": "s"}, *talk], [*talk, {"role": "tool", "content": "t"}]]
    path = write_lines(tmp_path / "chat.jsonl", [{"messages": messages} for messages in [*faults, faults[0]]])
    report = RowReport()
    assert not list(read_conversations(path, strict, report=report))
    assert [(cause[-9:], count) for cause, (count, _) in report.faults.items()] == [("no system", 2), (" no tools", 1)]


@pytest.mark.parametrize("keys", [{}, {"objective": "dpo"}], ids=str)
def test_tools_that_a_template_ignores_are_named(tmp_path, keys, said):
    tools = [{"type": "function", "function": {"name": "clock"}}]
    rows = [record | {"tools": tools} for record in records(60)]
    if keys:
        turns = [(record["messages"][:1], record["messages"][1:2]) for record in rows]
        other = {"rejected": [{"role": "assistant", "content": "?"}], "tools": tools}
        rows = [{"prompt": prompt, "chosen": answer} | other for prompt, answer in turns]
    load(write_lines(tmp_path / "chat.jsonl", rows), **keys)
    message = "rows that are changed: 60 x tools are left out: the chat template of plain does not read them"
    assert [line for line in said if message in line]


def test_prepare_and_show_say_what_is_left_out(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_lines(tmp_path / "chat.jsonl", [*records(20), *BAD])
    words = ["data", "prepare", "chat.jsonl", "out=tokens", "chat_template=plain", "tokenizer=bytes"]
    assert main(words) == runs.USAGE
    assert "3 rows cannot be learned" in capsys.readouterr().err
    assert main([*words, "bad_rows=skip"]) == 0
    assert main(["data", "show", "tokens"]) == 0
    assert capsys.readouterr().out.count("left out (bad_rows=skip): 3 rows: 2 x role 'bot'") == 2


def test_report_is_bounded():
    report = RowReport()
    for number in range(1000):
        report.add_fault(RowError("FILE", f"problem {number}" + "x" * 10_000))
    assert len(report.faults) == MAX_CAUSES + 1
    assert report.count == 1000
    [line] = report.describe()
    assert len(line) < 8000
    assert RowReport.from_json(json.loads(json.dumps(report.to_json()))) == report
