"""A conversation as `data show` prints it."""

import numpy as np

from shardformer.cli.chat_display import show_conversation
from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.data.tokens import Tokens
from shardformer.data.vocabulary import Bytes

TEXT, LEARNED = "Q: \x1b é?\nA: 😀!\n", "😀!\n"


def split() -> ChatSplit:
    ids = Bytes().encode(TEXT)
    learned = np.zeros(len(ids), np.uint8)
    learned[-len(LEARNED.encode()) :] = 1
    return ChatSplit(Tokens([ids], "TEST"), np.array([len(ids)]), Tokens([learned], "TEST"))


def test_what_is_learned_stands_between_marks():
    shown = show_conversation(split(), Bytes(), on_terminal=False)
    assert shown.endswith(">>>😀!\n<<<")
    assert "6 of 18 tokens are learned" in shown
    assert "\x1b" not in shown


def test_what_is_read_is_dimmed_on_a_terminal():
    shown = show_conversation(split(), Bytes(), on_terminal=True)
    assert shown.endswith("A: \x1b[0m😀!\n")
    assert shown.count("\x1b[2m") == 1


def test_white_space_after_the_end_of_a_turn_is_named():
    assert "the '\\n' after the end of a turn is learned" in show_conversation(split(), Bytes(), on_terminal=False)
    ids = Bytes().encode(TEXT)
    learned = np.zeros(len(ids), np.uint8)
    learned[-len(LEARNED.encode()) : -1] = 1
    without = ChatSplit(Tokens([ids], "TEST"), np.array([len(ids)]), Tokens([learned], "TEST"))
    shown = show_conversation(without, Bytes(), on_terminal=False)
    assert "the '\\n' after the end of a turn is read, not learned" in shown
