"""A conversation as a model learns it: what is only read is dimmed, or what is learned stands between marks.

`data show chat.jsonl` prints the first conversation of a file, before anything is prepared.
"""

import itertools
from pathlib import Path

import numpy as np

from shardformer import data
from shardformer.cli.arguments import say
from shardformer.cli.data_options import ShowOptions
from shardformer.data import Vocabulary, file_sources
from shardformer.data.chat.chat_files import mask_tokens, read_conversations
from shardformer.data.chat.chat_format import TEMPLATES
from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.data.chat.preference_windows import PreferenceSplit
from shardformer.data.chat.preferences import SIDES, encode_side, read_pairs
from shardformer.data.recipe import Recipe
from shardformer.data.source import SourceOptions
from shardformer.data.tokens import Tokens
from shardformer.errors import UsageError
from shardformer.tables import escape_controls

DIM, RESET = "\x1b[2m", "\x1b[0m"
BEGIN, END = ">>>", "<<<"  # around what is learned, where nothing can be dimmed
SHOWN = 2000  # tokens


def show_conversation(split: ChatSplit, vocabulary: Vocabulary, on_terminal: bool) -> str:
    """Returns the first conversation of a split, with a line that explains its marks."""
    length = min(int(split.ends[0]), SHOWN)
    trained = split.learned.take(0, length)
    printed = format_marked(split, vocabulary, length, on_terminal)
    after = describe_end_of_turn(split, vocabulary, length)
    explained = "what is dimmed is read, not learned" if on_terminal else f"{BEGIN}learned{END}, the rest is read"
    return (
        f"The first conversation ({int(trained.sum())} of {length} tokens are learned; {explained}{after}):\n{printed}"
    )


def format_marked(split: ChatSplit, vocabulary: Vocabulary, length: int, on_terminal: bool) -> str:
    """Returns the text of the first `length` tokens, with marks around what has a loss."""
    ids, trained = split.tokens.take(0, length), split.learned.take(0, length)
    printed, places = "", [0, *(n + 1 for n, (a, b) in enumerate(itertools.pairwise(trained)) if a != b), length]
    for start, end in itertools.pairwise(places):
        # Two decodings: a tokenizer may leave out the first space of a text.
        text = vocabulary.decode(ids[:end])[len(vocabulary.decode(ids[:start])) :]
        printed += _mark(escape_controls(text), bool(start < length and trained[start]), on_terminal)
    return printed


def describe_end_of_turn(split: ChatSplit, vocabulary: Vocabulary, length: int) -> str:
    """Returns a text on the white space after the first trained turn: templates differ in whether it is learned."""
    trained = split.learned.take(0, length)
    if not trained.any():
        return ""
    first = trained.tolist().index(True)
    end = next((n for n in range(first, length) if not trained[n]), length)
    ids = split.tokens.take(0, min(end + 1, length))
    text, behind = vocabulary.decode(ids[:end]), vocabulary.decode(ids)
    after = behind[len(text) :]
    if text != text.rstrip():
        space, is_trained = text[len(text.rstrip()) :], True
    elif after and after != after.lstrip():
        space, is_trained = after[: len(after) - len(after.lstrip())], False
    else:
        return "; no white space follows the end of a turn"
    return f"; the {space!r} after the end of a turn is {'learned' if is_trained else 'read, not learned'}"


def _mark(text: str, trained: bool, on_terminal: bool) -> str:
    if on_terminal:
        return text if trained else f"{DIM}{text}{RESET}"
    return f"{BEGIN}{text}{END}" if trained else text


def show_pair(sides: tuple[ChatSplit, ChatSplit, Vocabulary], on_terminal: bool) -> str:
    """Returns the two sides of a preference pair, with a line that explains their marks."""
    *splits, vocabulary = sides
    lines = []
    for name, split in zip(SIDES, splits, strict=True):
        length = len(split.tokens)
        scored = int(split.learned.take(0, length).sum())
        marked = format_marked(split, vocabulary, min(length, SHOWN), on_terminal)
        lines.append(f"{name} ({scored} of {length} tokens are scored):\n{marked}")
    explained = "what is dimmed is read, not scored" if on_terminal else f"{BEGIN}scored{END}, the rest is read"
    return f"The first preference pair ({explained}):\n\n" + "\n\n".join(lines)


def take_first_pair(split: PreferenceSplit) -> tuple[ChatSplit, ChatSplit]:
    """Returns the two sides of the first pair of a split."""
    chosen, rejected = int(split.ends[0]), int(split.ends[1])
    path = Path(split.tokens.name)
    spans = (0, chosen), (chosen, rejected - chosen)
    first, second = (_make_split(split.tokens.take(*span), split.learned.take(*span), path) for span in spans)
    return first, second


def _read_pair(recipe: Recipe, options: ShowOptions) -> tuple[ChatSplit, ChatSplit, Vocabulary]:
    """Returns the first pair of a recipe as token ids with masks, and their vocabulary."""
    vocabulary, path = _open_vocabulary(options), recipe.files[0]
    format = recipe.choose_format(vocabulary) if recipe.chat else None
    pair = next(read_pairs(path, format, letters=vocabulary.letters))
    chosen, rejected = (_make_split(*encode_side(vocabulary, side, str(path)), path) for side in pair)
    return chosen, rejected, vocabulary


def _make_split(ids: np.ndarray, trained: np.ndarray, path: Path) -> ChatSplit:
    return ChatSplit(Tokens([ids], str(path)), np.array([len(ids)]), Tokens([trained], str(path)))


def _open_vocabulary(options: ShowOptions) -> Vocabulary:
    return data.open_vocabulary("bytes" if options.tokenizer == "auto" else options.tokenizer, 0)


def show_chat_file(name: str, options: ShowOptions, on_terminal: bool) -> None:
    """Prints the first conversation of files, a folder or a glob; raises UsageError for other files."""
    settings = SourceOptions(options.text, chat_template=options.chat_template, pairs=options.pairs)
    recipe = file_sources.find_recipe([name], settings)
    if recipe.pairs and not recipe.chat:  # of texts, which need no template
        return say(show_pair(_read_pair(recipe, options), on_terminal))
    if not recipe.chat:
        raise UsageError(
            f"{name} is not a prepared folder, and holds no conversations; make a folder: data prepare {name} "
            "out=tokens, and then: data show tokens"
        )
    if options.tokenizer == options.chat_template == "auto":
        raise UsageError(
            f"{name} holds conversations; give the tokenizer whose template makes a text of them: data show {name} "
            f"tokenizer=HF_FOLDER, or a built-in template: chat_template={'|'.join(TEMPLATES)}"
        )
    if recipe.pairs:
        return say(show_pair(_read_pair(recipe, options), on_terminal))
    vocabulary, path = _open_vocabulary(options), recipe.files[0]
    first = next(read_conversations(path, recipe.choose_format(vocabulary), letters=vocabulary.letters))
    ids, offsets = vocabulary.encode_with_offsets(first.text, str(path))
    trained = mask_tokens(offsets, first.spans or ())
    trained[:1] = 0  # nothing is before the first token
    say(show_conversation(_make_split(ids, trained, path), vocabulary, on_terminal))
