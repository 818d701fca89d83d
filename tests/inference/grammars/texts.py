"""Random texts of a grammar."""

import random

from shardformer.inference.grammars.grammar import DEAD, Automaton, Rules


def is_text(rules: Rules, text: str) -> bool:
    """Returns whether a text is one of the rules."""
    automaton = Automaton(rules)
    return automaton.is_complete(automaton.run(text.encode()))


def draw_texts(rules: Rules, count: int, longest: int = 100, seed: int = 0) -> list[str]:
    automaton, draw = Automaton(rules), random.Random(seed)
    return [_draw_text(automaton, draw, longest) for _ in range(count)]


def _draw_text(automaton: Automaton, draw: random.Random, longest: int) -> str:
    state, text = automaton.start, b""
    while automaton.stacks(state) != {None}:
        automaton.fill([state])
        left = max(longest - len(text), 1)
        after = automaton.next[state]
        bytes_left = [byte for byte in range(256) if after[byte] != DEAD and automaton.least[after[byte]] < left]
        if not bytes_left or (automaton.is_complete(state) and draw.random() < 0.3):
            assert automaton.is_complete(state)
            break
        text += bytes([draw.choice(bytes_left)])
        state = int(after[text[-1]])
    return text.decode()
