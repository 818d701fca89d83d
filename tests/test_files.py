import contextlib

from shardformer.files import replacing


def test_nothing_temporary_stays_behind(tmp_path):
    path = tmp_path / "file.png"
    path.write_text("earlier")
    with contextlib.suppress(KeyboardInterrupt), replacing(path) as temporary:
        temporary.write_text("half")
        raise KeyboardInterrupt
    assert list(tmp_path.iterdir()) == [path]
    assert path.read_text() == "earlier"
