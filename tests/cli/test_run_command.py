"""`run_command`: a command from Python gets its arguments, returns its status and raises its errors."""

import pytest

from shardformer import RunError, UsageError, run_command


def test_words_and_keys_reach_the_command(tmp_path, capsys):
    (tmp_path / "old.py").write_text("from jax.experimental import maps\nmaps.xmap\n")
    assert run_command("legacy", "--check", tmp_path) == 0
    assert "jax.experimental.maps.xmap" in capsys.readouterr().out
    with pytest.raises(UsageError, match="layers must be at least 1, got 0"):
        run_command("show", "tiny", layers=0)


def test_found_difference_is_the_status(tmp_path):
    (tmp_path / "old.py").write_text("import jax\njax.experimental.maps.no_such_name\n")
    assert run_command("legacy", "--check", tmp_path) == 1


def test_wrong_command_names_the_commands():
    with pytest.raises(UsageError, match="unknown command 'trian'; the commands are train, "):
        run_command("trian", "tiny")


def test_failure_is_raised(tmp_path):
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(RunError, match="is damaged"):
        run_command("show", tmp_path)


def test_key_may_be_called_name(tmp_path):
    with pytest.raises(UsageError, match="unknown key 'name'"):
        run_command("show", "tiny", name="other")
