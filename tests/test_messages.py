"""Messages to the user: where they are printed, and how a program silences or takes them."""

import logging
import runpy

import jax
import pytest

from shardformer import messages
from shardformer.messages import log


def test_information_and_warnings_have_separate_streams(capsys):
    log.info("a step")
    log.warning("a cache that is damaged")
    assert capsys.readouterr() == ("a step\n", "a cache that is damaged\n")


def test_other_processes_print_warnings_only(capsys, monkeypatch):
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    log.info("a step")
    log.warning("a partner that does not answer")
    assert capsys.readouterr() == ("", "a partner that does not answer\n")


def test_a_level_silences(capsys):
    log.setLevel("ERROR")
    try:
        log.info("a step")
        log.warning("a cache that is damaged")
    finally:
        log.setLevel("INFO")
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize(("before", "after"), [("ERROR", "ERROR"), ("NOTSET", "INFO")])
def test_a_level_of_before_the_import_stays(monkeypatch, before, after):
    monkeypatch.setattr(log, "handlers", list(log.handlers))
    log.setLevel(before)
    try:
        runpy.run_path(messages.__file__)
        assert logging.getLevelName(log.level) == after
    finally:
        log.setLevel("INFO")


def test_a_root_handler_prints_no_second_time(capsys):
    handler = logging.StreamHandler()
    logging.getLogger().addHandler(handler)
    try:
        log.warning("once")
    finally:
        logging.getLogger().removeHandler(handler)
    assert capsys.readouterr().err == "once\n"


def test_a_handler_receives_messages_and_steps(capsys):
    """As a program would add one: with a file, say. Steps are not printed a second time, as a table shows them."""
    records: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = records.append
    log.addHandler(handler)
    try:
        log.info("a start")
        messages.log_step({"step": 10, "loss": 4.123456789, "val_loss": None})
    finally:
        log.removeHandler(handler)
    assert [(record.name, record.getMessage()) for record in records] == [
        ("shardformer", "a start"),
        ("shardformer.steps", "step=10 loss=4.12346"),
    ]
    assert records[1].row == {"step": 10, "loss": 4.123456789, "val_loss": None}
    assert capsys.readouterr() == ("a start\n", "")


def test_a_display_prints_what_goes_to_the_output(capsys):
    shown: list[str] = []
    with messages.printed_by(shown.append):
        log.info("above the bar")
        log.warning("beside it")
    log.info("after it")
    assert shown == ["above the bar"]
    assert capsys.readouterr() == ("after it\n", "beside it\n")


def test_silence_ends_with_its_block(capsys):
    with messages.silence():
        log.warning("unheard")
    log.info("heard")
    assert capsys.readouterr() == ("heard\n", "")
