"""Grammars of bytes, and the deterministic automaton that reads them byte by byte, built as far as it is needed."""

import functools
import math
from collections.abc import Iterable

import numpy as np

# A symbol is the name of a rule, or the bytes of which one follows. A rule has alternatives, each a tuple of symbols.
Symbol = str | frozenset[int]
Rules = dict[str, list[tuple[Symbol, ...]]]
# What may follow: the next symbol and the stack after it; None at the end of the text. The number is the stack's size.
Stack = tuple[Symbol, "Stack", int] | None

MOST_STACKED = 600  # symbols: a text that is nested deeper ends as soon as it can, or it could not be parsed
DEAD = 0  # the state after a byte that cannot follow
NEVER = np.iinfo(np.int32).max  # the bytes that it needs until the end


def spell(text: str | bytes) -> tuple[Symbol, ...]:
    """Returns the symbols of a fixed text."""
    content = text.encode() if isinstance(text, str) else text
    return tuple(frozenset([byte]) for byte in content)


def one_of(characters: str | Iterable[int]) -> Symbol:
    """Returns the symbol of one of some ASCII characters, or bytes."""
    return frozenset(characters.encode() if isinstance(characters, str) else characters)


class Automaton:
    """The states of a grammar. A state is a number; `least` has the bytes that it needs at least until the end.

    Rules without a finite text are left out, so that no text runs into one of them.
    """

    def __init__(self, rules: Rules, start: str = "root"):
        self._shortest = _measure(rules)
        finite = {name: [symbols for symbols in alternatives if self._is_finite(symbols)]
                  for name, alternatives in rules.items()}  # fmt: skip
        self._rules = {name: finite[name] for name in _reach(finite, start)}
        self._expand = functools.cache(self._expand_stack)
        self._stacks: list[frozenset[Stack]] = [frozenset()]
        self._numbers: dict[frozenset[Stack], int] = {frozenset(): DEAD}
        self.next = np.zeros((64, 256), np.int32)  # of filled states, by byte
        self._filled = np.array([True] + [False] * 63)
        self.least = np.full(64, NEVER, np.int32)
        self.start = self._number(self._expand((start, None, 1)))

    def __len__(self) -> int:
        return len(self._stacks)

    def list_choices(self) -> set[frozenset[int]]:
        """Returns the sets of bytes of which one follows somewhere in a text."""
        every = (symbol for alternatives in self._rules.values() for symbols in alternatives for symbol in symbols)
        return {symbol for symbol in every if not isinstance(symbol, str)}

    def is_complete(self, state: int) -> bool:
        """Returns whether the text may end here."""
        return None in self._stacks[state]

    def is_final(self, state: int) -> bool:
        """Returns whether the text must end here."""
        return self._stacks[state] == {None}

    def step(self, state: int, byte: int) -> int:
        """Returns the state after a byte."""
        self.fill([state])
        return int(self.next[state, byte])

    def run(self, text: bytes, state: int | None = None) -> int:
        """Returns the state after a text."""
        state = self.start if state is None else state
        for byte in text:
            state = self.step(state, byte)
        return state

    def fill(self, states: Iterable[int]) -> None:
        """Finds the states after each byte in some states."""
        for state in states:
            if not self._filled[state]:
                self._fill(int(state))

    def _fill(self, state: int) -> None:
        stacks = [stack for stack in self._stacks[state] if stack]
        reads = np.zeros((256, len(stacks)), bool)
        for column, (symbol, _, _) in enumerate(stacks):
            assert not isinstance(symbol, str)
            reads[list(symbol), column] = True
        kinds, kind_of_byte = np.unique(reads, axis=0, return_inverse=True)
        after = [
            self._number(frozenset().union(*(self._expand(stacks[i][1]) for i in np.flatnonzero(kind))))
            for kind in kinds
        ]
        self.next[state] = np.array(after, np.int32)[kind_of_byte.reshape(-1)]
        self._filled[state] = True

    def _number(self, stacks: frozenset[Stack]) -> int:
        number = self._numbers.setdefault(stacks, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(stacks)
            if number == len(self.least):
                self.next, self._filled, self.least = (
                    np.concatenate([array, np.zeros_like(array)]) for array in (self.next, self._filled, self.least)
                )
            self.least[number] = min(map(self._measure_stack, stacks), default=NEVER)
        return number

    def _expand_stack(self, stack: Stack) -> frozenset[Stack]:
        """Returns the stacks that begin with bytes, or are at the end, to which the rules on top of one lead."""
        found, seen, todo = set(), set(), [stack]
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if stack is None or not isinstance(stack[0], str):
                found.add(stack)
                continue
            name, rest = stack[0], stack[1]
            is_deep = rest is not None and rest[2] > MOST_STACKED
            for symbols in self._rules[name]:
                if is_deep and self._measure_symbols(symbols) > self._shortest[name]:
                    continue
                longer = rest
                for symbol in reversed(symbols):
                    longer = symbol, longer, longer[2] + 1 if longer else 1
                todo.append(longer)
        return frozenset(found)

    def _measure_stack(self, stack: Stack) -> int:
        length = 0
        while stack:
            length += self._measure_symbols(stack[:1])
            stack = stack[1]
        return length

    def _measure_symbols(self, symbols: tuple[Symbol, ...]) -> int:
        return sum(self._shortest[symbol] if isinstance(symbol, str) else 1 for symbol in symbols)

    def _is_finite(self, symbols: tuple[Symbol, ...]) -> bool:
        return all(not isinstance(symbol, str) or symbol in self._shortest for symbol in symbols)


def _reach(rules: Rules, start: str) -> set[str]:
    """Returns the rules that a start leads to."""
    reached, todo = {start}, [start]
    while todo:
        new = {s for symbols in rules[todo.pop()] for s in symbols if isinstance(s, str)} - reached
        reached |= new
        todo += new
    return reached


def _measure(rules: Rules) -> dict[str, int]:
    """Returns the bytes of the shortest text of each rule that has one, of smaller rules before larger ones."""
    shortest: dict[str, int] = {}
    changed = True
    while changed:
        changed = False
        for name, alternatives in rules.items():
            lengths = (sum(shortest.get(s, math.inf) if isinstance(s, str) else 1 for s in symbols)
                       for symbols in alternatives)  # fmt: skip
            if (length := min(lengths, default=math.inf)) < shortest.get(name, math.inf):
                shortest[name], changed = int(length), True
    return shortest
