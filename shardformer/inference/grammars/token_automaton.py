"""The tokens that a text of a grammar may go on with, for any tokenizer whose tokens are bytes."""

import functools
import threading
from collections.abc import Sequence

import numpy as np

from shardformer.inference.grammars.grammar import DEAD, NEVER, Automaton, State

MOST_STATES = 20_000  # of one automaton before a step, which adds those after the tokens that may follow
MOST_MASKS, MASK_BYTES = 2_000, 16_000_000  # of one automaton
LONGEST_TOKEN = 64  # bytes; longer ones are never drawn


class TokenTexts:
    """The bytes of each token, one after the other; tokens without a text, such as special ones, have none."""

    def __init__(self, texts: Sequence[bytes]):
        self.texts = [text if len(text) <= LONGEST_TOKEN else b"" for text in texts]
        self.lengths = np.array(list(map(len, self.texts)), np.int32)
        self.starts = np.cumsum(self.lengths) - self.lengths
        self.joined = np.frombuffer(b"".join(self.texts), np.uint8)

    @functools.cached_property
    def _short(self) -> frozenset[bytes]:
        return frozenset(text for text in self.texts if 0 < len(text) <= 4)

    def can_write(self, character: str) -> bool:
        """Returns whether a character is a token, or each of its bytes is."""
        text = character.encode()
        return text in self._short or all(bytes([byte]) in self._short for byte in text)


class TokenAutomaton:
    """The automaton of a grammar over tokens. Requests share it, of more than one thread.

    A text's state is what may follow it: a number of the automaton would mean nothing after its states were forgotten.
    """

    def __init__(self, automaton: Automaton, tokens: TokenTexts):
        self._automaton, self._tokens = automaton, tokens
        most = min(MOST_MASKS, MASK_BYTES // (len(tokens.lengths) // 8 + 1))
        self._find_mask = functools.lru_cache(most)(self._compute_mask)
        self._lock = threading.Lock()

    def read(self, state: State | None, token: int) -> State:
        """Returns the state after a token; the first one follows None."""
        with self._lock:
            return self._automaton.stacks(self._automaton.run(self._tokens.texts[token], self._number(state)))

    def allow(self, state: State | None, left: int) -> tuple[np.ndarray, bool]:
        """Returns which tokens [V] may follow, and whether the text may end.

        left: tokens that can be drawn. Those after which the rest could not be written with them are not allowed; if
        that are all, the ones after which the rest is shortest are.
        """
        with self._lock:
            number = self._number(state)
            packed, most = self._find_mask(number)
            if left > most:
                allowed = np.unpackbits(packed, count=len(self._tokens.lengths)).astype(bool)
            else:
                least = self._measure(number)  # a token has one byte at least
                allowed = (least < NEVER) & (least <= max(left - 1, least.min()))
            return allowed, self._automaton.is_complete(number)

    def is_final(self, state: State | None) -> bool:
        """Returns whether the text is complete and cannot go on."""
        return state == {None}

    def _number(self, state: State | None) -> int:
        """Returns the automaton's number of a state, after all others were forgotten if they are too many."""
        if len(self._automaton) > MOST_STATES:
            self._automaton.clear()
            self._find_mask.cache_clear()
        return self._automaton.start if state is None else self._automaton.number(state)

    def _measure(self, state: int) -> np.ndarray:
        """Returns the bytes that a text needs at least after each token; NEVER after one that cannot follow."""
        after = self._walk(state)
        return self._automaton.least[after]

    def _compute_mask(self, state: int) -> tuple[np.ndarray, int]:
        """Returns the tokens that may follow, as bits, and the most bytes that are then needed."""
        least = self._measure(state)
        allowed = least < NEVER
        return np.packbits(allowed), int(least[allowed].max(initial=0))

    def _walk(self, state: int) -> np.ndarray:
        """Returns the state after each token, all tokens read together, byte by byte."""
        tokens, automaton = self._tokens, self._automaton
        after = np.where(tokens.lengths > 0, state, DEAD).astype(np.int32)
        alive = np.flatnonzero(after)
        for position in range(LONGEST_TOKEN):
            alive = alive[tokens.lengths[alive] > position]
            if not alive.size:
                break
            automaton.fill(np.flatnonzero(np.bincount(after[alive])))
            after[alive] = automaton.next[after[alive], tokens.joined[tokens.starts[alive] + position]]
            alive = alive[after[alive] != DEAD]
        return after
