"""Parquet and Arrow files are read as records, and data sets that `datasets` saved as their files."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from shardformer.data import file_sources
from shardformer.data.chat.chat_files import read_conversations
from shardformer.data.source import SourceOptions
from shardformer.data.text_files import FileRange, read_pieces
from shardformer.errors import UsageError
from tests.data.chat.chats import records, template

ROWS = [{"text": "ab"}, {"text": "café 😀"}]
CALL = {"role": "assistant", "content": None, "tool_calls": [{"name": "f"}]}


def write(path, rows, file: bool = False):
    """Writes rows as Parquet, or as Arrow: a stream as `datasets` does, or a file."""
    table = pyarrow.Table.from_pylist(rows)
    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path)
        return path
    with (pyarrow.ipc.new_file if file else pyarrow.ipc.new_stream)(path, table.schema) as writer:
        writer.write_table(table)
    return path


def read_texts(path) -> list[str]:
    return [piece.text for piece in read_pieces(FileRange(path, 0, path.stat().st_size, True), "text")]


def save(folder, rows, **state):
    """Writes a data set as `datasets` saves it."""
    folder.mkdir(parents=True)
    write(folder / "data-00000-of-00001.arrow", rows)
    write(folder / "cache-1.arrow", [{"text": "no part of it"}])
    (folder / "dataset_info.json").write_text("{}")
    files = [{"filename": "data-00000-of-00001.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, "_indices_files": None, **state}))
    return folder


def find(path, **options):
    return file_sources.find_recipe([str(path)], SourceOptions(**options))


@pytest.mark.parametrize(("name", "file"), [("x.parquet", False), ("x.arrow", False), ("x.arrow", True)])
def test_rows_are_records(name, file, tmp_path):
    assert read_texts(write(tmp_path / name, ROWS, file)) == ["ab", "café 😀"]


def test_bytes_are_no_text(tmp_path):
    path = write(tmp_path / "x.parquet", [{"text": b"ab"}])
    with pytest.raises(UsageError, match=r"x.parquet, row 1, has no text under 'text'"):
        read_texts(path)


def test_a_folder_of_parquet_files_leaves_its_readme_out(tmp_path):
    (tmp_path / "README.md").write_text("about it")
    path = write(tmp_path / "x.parquet", ROWS)
    assert find(tmp_path).files == (path,)


def test_a_saved_data_set_is_its_files(tmp_path):
    assert [file.name for file in find(save(tmp_path / "saved", ROWS)).files] == ["data-00000-of-00001.arrow"]


def test_a_folder_of_splits_asks_for_one(tmp_path):
    save(tmp_path / "saved" / "train", ROWS)
    (tmp_path / "saved" / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with pytest.raises(UsageError, match=r"is a folder of splits; name one: data=.*/train"):
        find(tmp_path / "saved")


def test_a_saved_data_set_with_an_index_is_rejected(tmp_path):
    with pytest.raises(UsageError, match=r"flatten_indices"):
        find(save(tmp_path / "saved", ROWS, _indices_files=[{"filename": "indices.arrow"}]))


def test_a_saved_data_set_that_lacks_a_file_is_rejected(tmp_path):
    save(tmp_path / "saved", ROWS)
    (tmp_path / "saved" / "data-00000-of-00001.arrow").unlink()
    with pytest.raises(UsageError, match=r"lacks data-00000-of-00001.arrow"):
        find(tmp_path / "saved")


def test_conversations_of_a_table_are_those_of_a_file(tmp_path):
    rows = records(4)
    rows[0]["messages"].append(CALL)
    lines = tmp_path / "x.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in rows))
    table = write(tmp_path / "x.parquet", rows)
    assert find(table, chat_template="plain").chat == "plain"
    format = template("{{ messages | map(attribute='role') | join }}{% generation %}{{ messages[-1] | tojson }}"
                      "{% endgeneration %}")  # fmt: skip
    found = [[piece.text for piece in read_conversations(path, format)] for path in (lines, table)]
    assert found[0] == found[1]


def test_column_of_lists_is_no_text(tmp_path):
    path = write(tmp_path / "x.parquet", [{"text": ["a", "b"]}])
    with pytest.raises(UsageError, match=r"x.parquet, row 1, has a text of list; expected text"):
        read_texts(path)
