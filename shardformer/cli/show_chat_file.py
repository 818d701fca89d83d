"""`data show chat.jsonl`: the first conversation of a file as a model would learn it, before anything is prepared."""

import dataclasses

import numpy as np

from shardformer.cli.arguments import say
from shardformer.cli.chat_display import show_conversation
from shardformer.config.keys import key
from shardformer.data import corpus, sources
from shardformer.data.chat.builtin_templates import TEMPLATES
from shardformer.data.chat.chat_files import read_conversations
from shardformer.data.chat.chat_windows import ChatSplit
from shardformer.data.chat.encoding import mask_tokens
from shardformer.data.source import SourceOptions
from shardformer.data.tokens import Tokens
from shardformer.errors import UsageError


@dataclasses.dataclass(frozen=True)
class ShowOptions:
    """data show: a file of conversations."""

    tokenizer: str = key("auto", "a folder with tokenizer.json, such as a Hugging Face folder; auto: bytes")
    chat_template: str = key("auto", f"{', '.join(TEMPLATES)}; auto: that of the tokenizer")
    text: str = key("text", "name of the field that holds the text of .jsonl records")


def show_chat_file(name: str, options: ShowOptions, on_terminal: bool) -> None:
    """Prints the first conversation of files, a folder or a glob; raises UsageError for other files."""
    recipe = sources.find_recipe([name], SourceOptions(options.text, chat_template=options.chat_template), say)
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
    tokenizer = "bytes" if options.tokenizer == "auto" else options.tokenizer
    vocabulary = corpus.open_vocabulary(tokenizer, 0)
    path = recipe.files[0]
    first = next(read_conversations(path, recipe.choose_format(vocabulary)))
    ids, offsets = vocabulary.encode_with_offsets(first.text, str(path))
    trained = mask_tokens(offsets, first.spans or ())
    trained[:1] = 0  # nothing is before the first token
    split = ChatSplit(Tokens([ids], str(path)), np.array([len(ids)]), Tokens([trained], str(path)))
    say(show_conversation(split, vocabulary, on_terminal))
