"""Arrays and lines of JSON under any suffix: read as records, and never as text without a word."""

import gzip
import hashlib
import io
import json
import tracemalloc

import pytest

from shardformer.data import file_sources, json_records, text_files
from shardformer.data.digests import digest_files
from shardformer.data.source import SourceOptions
from shardformer.errors import UsageError
from tests.surroundings import change_text_limits

TEXTS = ["one", 'two, "quoted" ] }', "drei äöü 😀", "\n[{", ""]
ARRAY = json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False, indent=1)
LINES = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS)


def read(path, **options) -> list[str]:
    recipe = file_sources.find_recipe([str(path)], SourceOptions(**options))
    return [piece.text for piece in recipe.pieces("train", "validation", "test")]


def write(folder, name: str, text: str):
    path = folder / name
    path.write_bytes(gzip.compress(text.encode()) if name.endswith(".gz") else text.encode())
    return path


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", ARRAY),
        ("compact.json", json.dumps([{"text": text} for text in TEXTS])),
        ("marked.json", "\ufeff" + ARRAY),
        ("lines.json", LINES),
        ("packed.json.gz", ARRAY),
        ("A.JSON", ARRAY),
        ("lines.jsonl", LINES),
    ],
)
def test_records_of_json_are_documents(tmp_path, name, text):
    assert read(write(tmp_path, name, text)) == TEXTS


@pytest.mark.parametrize("chunk", [1, 2, 7, 64])
def test_elements_may_cross_chunks(chunk):
    class Pipe(io.BytesIO):
        """A file that gives fewer bytes than it is asked for."""

        def read(self, size):
            return super().read(min(size, chunk))

    values = [{"a": [1, {"b": '\\"é'}]}, 12345, -1.5e3, "x", None, True, []]
    found = json_records.read_array(Pipe(json.dumps(values, ensure_ascii=False).encode()), "FILE", 1000)
    assert [json.loads(value) for value, _ in found] == values


@pytest.mark.parametrize(
    ("name", "text"),
    [("chat.txt", '[{"messages": []}]'), ("chat", LINES), ("a.md", '  [\n {"text": "x"}]'), ("a.txt.gz", ARRAY),
     ("long.txt", '{"text": "' + "x" * 100_000 + '"}')],
)  # fmt: skip
def test_records_under_another_suffix_are_rejected(tmp_path, name, text):
    path = write(tmp_path, name, text)
    with pytest.raises(UsageError, match=r"holds records of JSON.*name it \.json or \.jsonl"):
        read(path)


@pytest.mark.parametrize("suffix", [".json", ".txt"])
@pytest.mark.parametrize("wrapped", [{"version": 1, "data": [{"text": "x"}]}, {"messages": [{"role": "user"}]}])
def test_records_inside_of_an_object_are_rejected(tmp_path, wrapped, suffix):
    path = write(tmp_path, f"a{suffix}", json.dumps(wrapped, indent=1))
    with pytest.raises(UsageError, match=r"holds records inside of another object or array"):
        read(path)


def test_array_of_arrays_is_no_text(tmp_path):
    with pytest.raises(UsageError, match="holds records inside of another object or array"):
        read(write(tmp_path, "a.txt", json.dumps([[{"role": "user", "content": "x"}]])))


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.txt", "[a link] and {braces}\nmore"), ("a.txt", "{ a poem }"), 
     ("settings.json", '{\n "a": 1\n}'), ("tasks.json", '{\n "tasks": [{"a": 1}]\n}'),
     ("code.js", '[{"a": 1}].map(f)'), ("a.txt", '{"open')],
)  # fmt: skip
def test_other_texts_stay_texts(tmp_path, name, text):
    assert "".join(read(write(tmp_path, name, text * 20))) == text * 20


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('[{"text": "a"}, {"text": "b"', "a.json, record 2, is cut: the file ends inside of it"),
        ('[{"text": "a"} {"text": "b"}]', "record 1, is followed by '{' instead of a comma"),
        ('[{"text": "a"},]', "record 2, is not JSON: Expecting value"),
        ('[{"text": "a"}] []', r"has '\[' after the end of its array"),
        ('[{"text": "a"}, {"text": nothing' + " " * 40 + "}]", "record 2, is not JSON"),
        ("[" * 100_000, "record 1, is nested too deep"),
        ('[{"text": "a"}, 3]', "record 2, has no text under 'text'"),
        ('[{"text": "a"}, {"body": "b"}]', "record 2, has no text under 'text'"),
    ],
)
def test_wrong_array_is_named(tmp_path, text, message):
    with pytest.raises(UsageError, match=message):
        read(write(tmp_path, "a.json", text))


def test_long_array_takes_bounded_memory(tmp_path):
    path = tmp_path / "long.json"
    with open(path, "w") as file:
        record = json.dumps({"text": "word " * 2000})
        file.write("[" + ",\n".join([record] * 3000) + "]")
    assert path.stat().st_size > 28 << 20
    tracemalloc.start()
    assert sum(1 for _ in text_files.read_lines(path)) == 3000
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 12 << 20


def test_element_that_is_too_long_is_rejected():
    content = io.BytesIO(json.dumps([{"text": "x" * 5000}]).encode())
    with pytest.raises(UsageError, match="record 1, has more than 1,000 characters"):
        list(json_records.read_array(content, "FILE", 1000))


def test_endless_empty_lines_are_rejected(tmp_path, monkeypatch):
    change_text_limits(monkeypatch, empty_lines=100)
    path = write(tmp_path, "a.jsonl.gz", '{"text": "a"}\n' + "\n" * 99 + '{"text": "b"}\n')
    assert len(list(text_files.read_lines(path))) == 2
    path = write(tmp_path, "b.jsonl.gz", '{"text": "a"}\n' + "\n" * 200)
    with pytest.raises(UsageError, match="more than 100 empty lines in a row"):
        list(text_files.read_lines(path))


def test_folder_that_learned_records_as_text_is_not_reused(tmp_path):
    write(tmp_path, "a.json", ARRAY)
    write(tmp_path, "b.json", LINES)
    found = file_sources.find_recipe([str(tmp_path)], SourceOptions())
    files = [(str(path), digest) for path, digest in zip(found.files, digest_files(found.files), strict=True)]
    earlier = json.dumps([2, files, ["text", found.share, False]])
    assert found.identity() != hashlib.sha256(earlier.encode()).hexdigest()
