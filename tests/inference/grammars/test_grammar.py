"""The automaton accepts the texts of its rules only, and knows how soon a text can end."""

import sys

import pytest

from shardformer.errors import UsageError
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
    assert automaton.stacks(automaton.run(b"ab")) == {None}
    assert automaton.run(b"b") == DEAD
    endless = Automaton(RECURSIVE, "endless")
    assert endless.least[endless.start] == NEVER


def test_deep_texts_end_soon():
    automaton = Automaton(PAIRS)
    state = automaton.run(b"(" * MOST_STACKED)
    assert automaton.step(state, ord("(")) != DEAD
    assert automaton.run(b"((", state) == DEAD
    assert automaton.stacks(automaton.run(b"(" + b")" * (MOST_STACKED + 1), state)) == {None}


def test_long_fixed_text():
    """A hash of nested tuples would end the process: it recurses in C."""
    automaton = Automaton({"root": [spell("a" * 200_000)]})
    assert automaton.least[automaton.start] == 200_000
    assert automaton.least[automaton.run(b"aa")] == 199_998


def test_ambiguous_text_is_rejected():
    """Each bracket may begin an array of either rule, which doubles the stacks."""
    arrays = {f"array{n}": [(*spell("["), "root", f"end{n}")] for n in range(2)}
    ends = {f"end{n}": [spell("]")] for n in range(2)}
    automaton = Automaton({"root": [("array0",), ("array1",), spell("0")], **arrays, **ends})
    assert automaton.stacks(automaton.run(b"[[0]]")) == {None}
    with pytest.raises(UsageError, match="more than 2,000 ways"):
        automaton.run(b"[" * 13)


def test_very_long_texts_are_never_entered():
    rules: Rules = {f"rule{n}": [(f"rule{n + 1}",) * 1000] for n in range(4)} | {"rule4": [spell("a")]}
    assert Automaton(rules, "rule0").shortest == 10**12
    automaton = Automaton(rules | {"root": [(*spell("a"), "rule0"), spell("b")]})
    assert automaton.shortest == 1
    assert automaton.least[automaton.run(b"a")] == NEVER


def test_work_grows_with_the_rules():
    """Parents before their children: a sweep over all rules would find one length each time."""
    count = 3000
    rules: Rules = {f"rule{n}": [(*spell("a"), f"rule{n + 1}")] for n in range(count)} | {f"rule{count}": [()]}
    assert count_calls(lambda: Automaton(rules, "rule0")) < 100 * count


def count_calls(function) -> int:
    calls = 0

    def count(_frame, _event, _value):
        nonlocal calls
        calls += 1

    sys.setprofile(count)
    try:
        function()
    finally:
        sys.setprofile(None)
    return calls
