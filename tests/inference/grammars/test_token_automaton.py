"""The allowed tokens are those after which the text of the grammar can go on and end in time."""

import json
import random

import numpy as np

from shardformer.inference.grammars import token_automaton
from shardformer.inference.grammars.grammar import DEAD, Automaton
from shardformer.inference.grammars.json_rules import JSON_OBJECT
from shardformer.inference.grammars.token_automaton import (
    LONGEST_TOKEN,
    MASK_BYTES,
    MOST_MASKS,
    TokenAutomaton,
    TokenTexts,
)

LONGER = [b'{"', b'": ', b"abc", b"}}", "é".encode() + b"x", b'", "', b"", b" " * (LONGEST_TOKEN + 1)]
TEXTS = [bytes([byte]) for byte in range(256)] + LONGER


def test_allowed_tokens_are_those_that_can_be_read():
    tokens = TokenAutomaton(Automaton(JSON_OBJECT), TokenTexts(TEXTS))
    alone, text, state, draw = Automaton(JSON_OBJECT), b"", None, random.Random(0)
    for _ in range(30):
        allowed, _ = tokens.allow(state, 10**6)
        here = alone.run(text)
        expected = [bool(new) and len(new) <= LONGEST_TOKEN and alone.run(new, here) != DEAD for new in TEXTS]
        np.testing.assert_array_equal(allowed, expected)
        token = draw.choice([n for n in np.flatnonzero(allowed) if TEXTS[n][-1:] != b"}"])
        text, state = text + TEXTS[token], tokens.read(state, token)


def test_text_ends_in_time():
    """Of few tokens, the last ones can only close what is open."""
    tokens, draw = TokenAutomaton(Automaton(JSON_OBJECT), TokenTexts(TEXTS)), random.Random(0)
    for count in [1, 2, 3, 7, 20] * 8:
        state, text = None, b""
        for left in range(count, 0, -1):
            allowed, _ = tokens.allow(state, left)
            token = draw.choice(np.flatnonzero(allowed).tolist())
            text, state = text + TEXTS[token], tokens.read(state, token)
            if tokens.is_final(state):
                break
        assert count == 1 or isinstance(json.loads(text), dict)  # {} has two


def test_states_are_forgotten_and_found_again(monkeypatch):
    """One text made the automaton grow without a bound; forgetting changes no mask."""
    small, large = (Automaton(JSON_OBJECT) for _ in range(2))
    bounded, free = TokenAutomaton(small, TokenTexts(TEXTS)), TokenAutomaton(large, TokenTexts(TEXTS))
    states, most = [None, None], 0
    for byte in b'{"a":' * 40:
        for n, (tokens, bound) in enumerate([(bounded, 50), (free, 10**6)]):
            monkeypatch.setattr(token_automaton, "MOST_STATES", bound)
            states[n] = tokens.read(states[n], byte)
        np.testing.assert_array_equal(free.allow(states[1], 10**6)[0], bounded.allow(states[0], 10**6)[0])
        most = max(most, len(small))
    assert most < 150 < len(large)
    assert not free.is_final(states[1])


def test_characters_of_tokens():
    tokens = TokenTexts([b"a", b"bc", b"", b"\xc3", b"\xa9", "ü".encode()])
    assert [character for character in "abcéüö" if tokens.can_write(character)] == ["a", "é", "ü"]


def test_bytes_of_masks_are_bounded():
    few, many = (TokenAutomaton(Automaton(JSON_OBJECT), TokenTexts([b"{"] * count)) for count in (300, 800_000))
    most = [tokens._find_mask.cache_info().maxsize for tokens in (few, many)]
    assert most[0] == MOST_MASKS
    assert most[1] * 800_000 / 8 <= MASK_BYTES
