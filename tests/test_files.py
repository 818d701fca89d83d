import contextlib
import os

import pytest

from shardformer import files
from shardformer.errors import RunError, UsageError
from shardformer.files import replacing
from tests.shared import room
from tests.surroundings import hide_home


def test_interrupted_replacing_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "file.png"
    path.write_text("earlier")
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "earlier"


def test_replacing_on_a_full_disk_names_the_file(tmp_path):
    with (
        room(100),
        pytest.raises(OSError, match=r"File too large: '.*/file\.png'$"),
        replacing(tmp_path / "file.png") as temporary,
    ):
        temporary.write_bytes(b"x" * 1000)
    assert list(tmp_path.iterdir()) == []


def test_replacing_keeps_the_name_in_an_error_of_another_file(tmp_path):
    with pytest.raises(OSError, match="other"), replacing(tmp_path / "file.png"):
        (tmp_path / "other").read_bytes()


def test_two_writers_of_one_file_do_not_interfere(tmp_path):
    path = tmp_path / "file"
    with replacing(path) as one:
        one.write_text("one")
        with replacing(path) as other:
            other.write_text("other")
        assert path.read_text() == "other"
    assert path.read_text() == "one"
    assert list(tmp_path.iterdir()) == [path]


def test_reading_rejects_pipes_devices_and_large_files(tmp_path):
    """A pipe would wait for ever, and a device has no end."""
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "zero").symlink_to("/dev/zero")
    for name in ("pipe", "zero"):
        with pytest.raises(OSError, match="a pipe or a device"):
            files.read_bytes(tmp_path / name)
    with pytest.raises(IsADirectoryError):
        files.read_bytes(tmp_path)
    (tmp_path / "large").write_bytes(b"12345")
    with pytest.raises(OSError, match="It has 5 bytes, more than the 4 of such a file"):
        files.read_bytes(tmp_path / "large", 4)
    (tmp_path / "text").write_bytes("a\r\né\rb\n".encode())
    assert files.read_text(tmp_path / "text") == (tmp_path / "text").read_text("utf-8") == "a\né\nb\n"


def test_expand_home_rejects_an_unknown_home(monkeypatch):
    hide_home(monkeypatch)
    for path in ("~", "~/run"):
        with pytest.raises(UsageError, match="HOME is not set, so ~ is unknown; give an absolute path"):
            files.expand_home(path)
    for path in ("a~/b", "~other/run", "/tmp/~", ""):
        assert files.expand_home(path) == path


def test_temporary_files_of_killed_writes_are_removed(tmp_path):
    others = {".step_00000004.tmp-12345678", ".hidden", "a.tmp-0123456789abcdef", ".a.tmp-"}
    for name in (*others, ".config.json.tmp-0123456789abcdef.json", ".lock.tmp-0123456789abcdef"):
        (tmp_path / name).touch()
    (tmp_path / ".b.tmp-0123456789abcdef").mkdir()
    files.remove_temporary(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == others | {".b.tmp-0123456789abcdef"}


def test_young_temporary_files_stay_where_others_write(tmp_path):
    old, young = (tmp_path / f".{name}.tmp-0123456789abcdef" for name in ("old", "young"))
    for path in (old, young):
        path.touch()
    os.utime(old, (0, 0))
    files.remove_temporary(tmp_path, least_age=3600)
    assert [path.exists() for path in (old, young)] == [False, True]


def test_killed_write_is_cleaned_by_its_name(tmp_path):
    """`replacing` chooses names that `remove_temporary` knows."""
    with files.replacing(tmp_path / "a.b.json") as temporary:
        temporary.touch()
        files.remove_temporary(tmp_path)
        assert not temporary.exists()
        temporary.touch()


def test_growing_file_and_lock_follow_no_link(tmp_path):
    path = tmp_path / "texts.jsonl"
    path.symlink_to("absent")
    with pytest.raises(RunError, match=r"cannot write .*texts\.jsonl"):
        files.GrowingFile(path).append(b"text")
    with pytest.raises(OSError, match="symbolic links"), files.locked(path):
        pass
    assert not (tmp_path / "absent").exists()
