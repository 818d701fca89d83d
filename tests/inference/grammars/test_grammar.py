"""The automaton accepts the texts of its rules only, and knows how soon a text can end."""

from shardformer.inference.grammars.grammar import DEAD, MOST_STACKED, NEVER, Automaton, Rules, one_of, spell
from tests.inference.grammars.texts import is_text

PAIRS: Rules = {"root": [(), (*spell("("), "root", *spell(")"))]}
RECURSIVE: Rules = {"root": [("root",), ("endless",), spell("ab")], "endless": [(one_of("ab"), "endless")]}


def test_nested_texts_are_accepted():
    assert all(is_text(PAIRS, "(" * n + ")" * n) for n in range(5))
    assert not any(is_text(PAIRS, text) for text in ("(", ")", "(()", "())", "()()"))


def test_least_bytes_until_the_end():
    automaton = Automaton(PAIRS)
    assert [int(automaton.least[automaton.run(b"(" * n)]) for n in range(4)] == [0, 1, 2, 3]
    assert automaton.least[DEAD] == NEVER


def test_rules_without_an_end_are_left_out():
    """`endless` would accept ab as a beginning of which no text comes."""
    automaton = Automaton(RECURSIVE)
    assert automaton.is_final(automaton.run(b"ab"))
    assert automaton.run(b"b") == DEAD
    endless = Automaton(RECURSIVE, "endless")
    assert endless.least[endless.start] == NEVER


def test_deep_texts_end_soon():
    automaton = Automaton(PAIRS)
    state = automaton.run(b"(" * MOST_STACKED)
    assert automaton.step(state, ord("(")) != DEAD
    assert automaton.run(b"((", state) == DEAD
    assert automaton.is_final(automaton.run(b"(" + b")" * (MOST_STACKED + 1), state))
