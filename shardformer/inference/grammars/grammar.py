"""Grammars of bytes, and the deterministic automaton that reads them byte by byte, built as far as it is needed."""

import functools
import heapq
from collections.abc import Iterable
from typing import Any

import numpy as np

from shardformer.errors import UsageError

# A symbol is the name of a rule, or the bytes of which one follows. A rule has alternatives, each a tuple of symbols.
Symbol = str | frozenset[int]
Rules = dict[str, list[tuple[Symbol, ...]]]
MOST_STACKED = 600  # symbols: a text that is nested deeper ends as soon as it can, or it could not be parsed
MOST_STACKS = 2_000  # of a state: in an ambiguous grammar, each byte may double them
DEAD = 0  # the state after a byte that cannot follow
NEVER = np.iinfo(np.int32).max  # the bytes that it needs until the end


def spell(text: str | bytes) -> tuple[Symbol, ...]:
    """Returns the symbols of a fixed text."""
    content = text.encode() if isinstance(text, str) else text
    return tuple(frozenset([byte]) for byte in content)


def one_of(characters: str | Iterable[int]) -> Symbol:
    """Returns the symbol of one of some ASCII characters, or bytes."""
    return frozenset(characters.encode() if isinstance(characters, str) else characters)


class Pushed:
    """A symbol on a stack. An automaton makes one object of equal ones, so that to compare stacks takes no time.

    size: its symbols. least: the bytes that they need at least.
    """

    __slots__ = ("least", "rest", "size", "symbol")

    def __init__(self, symbol: Symbol, rest: "Stack", least: int):
        self.symbol, self.rest = symbol, rest
        self.size: int = rest.size + 1 if rest else 1
        self.least: int = rest.least + least if rest else least


Stack = Pushed | None  # what may follow; None at the end of the text
State = frozenset[Stack]


class Automaton:
    """The states of a grammar. A state is a number; `least` has the bytes that it needs at least until the end.

    Rules without a finite text are left out, so that no text runs into one of them.
    """

    def __init__(self, rules: Rules, start: str = "root"):
        self._shortest = _measure(rules)
        self.shortest = self._shortest.get(start)  # bytes of a text; None if there is none
        finite = {name: [symbols for symbols in alternatives if self._is_finite(symbols)]
                  for name, alternatives in rules.items()}  # fmt: skip
        self._rules = {name: finite[name] for name in _reach(finite, start)}
        self._start = start
        self.clear()

    def clear(self) -> None:
        """Forgets all states. Their numbers then mean nothing; `number` gives new ones to their stacks."""
        self._expand = functools.cache(self._expand_stack)
        self._push = functools.cache(self._push_symbol)
        self._stacks: list[frozenset[Stack]] = [frozenset()]
        self._numbers: dict[frozenset[Stack], int] = {frozenset(): DEAD}
        self.next = np.zeros((64, 256), np.int32)  # of filled states, by byte
        self._filled = np.array([True] + [False] * 63)
        self.least = np.full(64, NEVER, np.int32)
        self.start = self.number(self._expand(self._push(self._start, None)))

    def __len__(self) -> int:
        return len(self._stacks)

    def stacks(self, state: int) -> State:
        """Returns what may follow a state, from which `number` finds it again."""
        return self._stacks[state]

    def number(self, stacks: State) -> int:
        """Returns the number of the state after which some stacks may follow."""
        if len(stacks) > MOST_STACKS:
            raise UsageError(
                f"the text can be read in more than {MOST_STACKS:,} ways by its schema; make the parts of anyOf differ"
            )
        number = self._numbers.setdefault(stacks, len(self._stacks))
        if number == len(self._stacks):
            self._stacks.append(stacks)
            if number == len(self.least):
                self.next, self._filled, self.least = (
                    np.concatenate([array, np.zeros_like(array)]) for array in (self.next, self._filled, self.least)
                )
            self.least[number] = min([NEVER, *(stack.least if stack else 0 for stack in stacks)])
        return number

    def list_choices(self) -> set[frozenset[str]]:
        """Returns the sets of characters of which one must follow somewhere in a text."""
        choices = set()
        for symbols in (symbols for alternatives in self._rules.values() for symbols in alternatives):
            bytes_read = [symbol for symbol in symbols if not isinstance(symbol, str)]
            choices |= {frozenset(map(chr, symbol)) for symbol in bytes_read if min(symbol) < 128}
            fixed = b"".join(bytes(symbol) if len(symbol) == 1 else b" " for symbol in bytes_read)
            # Of the characters of a string, some rules have a fixed first byte only, which is ignored.
            choices |= {frozenset(character) for character in fixed.decode(errors="ignore") if character > "\x7f"}
        return choices

    def is_complete(self, state: int) -> bool:
        """Returns whether the text may end here."""
        return None in self._stacks[state]

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
        for column, stack in enumerate(stacks):
            assert not isinstance(stack.symbol, str)
            reads[list(stack.symbol), column] = True
        kinds, kind_of_byte = np.unique(reads, axis=0, return_inverse=True)
        after = [
            self.number(frozenset().union(*(self._expand(stacks[i].rest) for i in np.flatnonzero(kind))))
            for kind in kinds
        ]
        self.next[state] = np.array(after, np.int32)[kind_of_byte.reshape(-1)]
        self._filled[state] = True

    def _expand_stack(self, stack: Stack) -> frozenset[Stack]:
        """Returns the stacks that begin with bytes, or are at the end, to which the rules on top of one lead."""
        found, seen, todo = set(), set(), [stack]
        while todo:
            stack = todo.pop()
            if stack in seen:
                continue
            seen.add(stack)
            if stack is None or not isinstance(stack.symbol, str):
                found.add(stack)
                continue
            name, rest = stack.symbol, stack.rest
            is_deep = rest is not None and rest.size > MOST_STACKED
            for symbols in self._rules[name]:
                if is_deep and self._measure_symbols(symbols) > self._shortest[name]:
                    continue
                longer = rest
                for symbol in reversed(symbols):
                    longer = self._push(symbol, longer)
                todo.append(longer)
        return frozenset(found)

    def _push_symbol(self, symbol: Symbol, rest: Stack) -> Pushed:
        return Pushed(symbol, rest, self._measure_symbols((symbol,)))

    def _measure_symbols(self, symbols: tuple[Symbol, ...]) -> int:
        return sum(self._shortest.get(symbol, NEVER) if isinstance(symbol, str) else 1 for symbol in symbols)

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
    """Returns the bytes of the shortest text of each rule that has one, of smaller rules before larger ones.

    This is Knuth's algorithm: Dijkstra's, where an alternative is reached when all of its rules are.
    """
    # By rule, the alternatives that wait for it: their bytes so far, their rule, and how many rules they wait for.
    users: dict[str, list[list[Any]]] = {}
    reached: list[tuple[int, str]] = []
    for name, alternatives in rules.items():
        for symbols in alternatives:
            named = [symbol for symbol in symbols if isinstance(symbol, str)]
            alternative: list[Any] = [len(symbols) - len(named), name, len(named)]
            for symbol in named:
                users.setdefault(symbol, []).append(alternative)
            if not named:
                reached.append((len(symbols), name))
    heapq.heapify(reached)
    shortest: dict[str, int] = {}
    while reached:
        length, name = heapq.heappop(reached)
        if name in shortest:
            continue
        shortest[name] = length
        for alternative in users.get(name, ()):
            alternative[0] += length
            alternative[2] -= 1
            if not alternative[2]:
                heapq.heappush(reached, (alternative[0], alternative[1]))
    return shortest
