"""A conversation as a model learns it: what is only read is dimmed, or what is learned stands between marks."""

import itertools

from shardformer.data import Vocabulary
from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.tables import escape_controls

DIM, RESET = "\x1b[2m", "\x1b[0m"
BEGIN, END = ">>>", "<<<"  # around what is learned, where nothing can be dimmed
SHOWN = 2000  # tokens


def show_conversation(split: ChatSplit, vocabulary: Vocabulary, on_terminal: bool) -> str:
    """Returns the first conversation of a split, with a line that explains its marks."""
    length = min(int(split.ends[0]), SHOWN)
    ids, learned = split.tokens.take(0, length), split.learned.take(0, length)
    shown, places = "", [0, *(n + 1 for n, (a, b) in enumerate(itertools.pairwise(learned)) if a != b), length]
    for start, end in itertools.pairwise(places):
        # Two decodings: a tokenizer may leave out the first space of a text.
        text = vocabulary.decode(ids[:end])[len(vocabulary.decode(ids[:start])) :]
        shown += _mark(escape_controls(text), bool(start < length and learned[start]), on_terminal)
    explained = "what is dimmed is read, not learned" if on_terminal else f"{BEGIN}learned{END}, the rest is read"
    return f"The first conversation ({int(learned.sum())} of {length} tokens are learned; {explained}):\n{shown}"


def _mark(text: str, learned: bool, on_terminal: bool) -> str:
    if on_terminal:
        return text if learned else f"{DIM}{text}{RESET}"
    return f"{BEGIN}{text}{END}" if learned else text
