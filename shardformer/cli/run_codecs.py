"""The encoding of texts for a trained run."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from shardformer.cli.text_options import TextOptions
from shardformer.data import Vocabulary
from shardformer.data.stored_vocabulary import TOKENIZER_FOLDER
from shardformer.errors import UsageError
from shardformer.inference.text_codec import TextCodec
from shardformer.training.run_folder import Run

if TYPE_CHECKING:
    from shardformer.inference.chat_codec import ChatCodec


def open_codec(run: Run, options: TextOptions) -> TextCodec:
    """Returns the codec of a run; a run without training data was converted, and reads documents as published."""
    bos = run.config.data.bos if options.bos == "auto" else options.bos
    return TextCodec(run.vocabulary, run.special_tokens, bos, options.special_tokens, published=not run.fingerprint)


def choose_chat_vocabulary(run: Run, options: TextOptions) -> Vocabulary:
    """Returns the vocabulary of messages, whose special tokens are letters unless training or the user reads them."""
    if options.special_tokens == "auto":
        return run.vocabulary
    return run.vocabulary.with_special_tokens(options.special_tokens == "true")


def open_chat_codec(run: Run, codec: TextCodec, options: TextOptions, stops: Sequence[str] = ()) -> "ChatCodec":
    """Returns the codec of a run's chat template; raises UsageError if it has none."""
    from shardformer.data.chat.chat_format import read_format  # not imported without a chat
    from shardformer.inference.chat_codec import ChatCodec

    format = run.vocabulary.chat or read_format(Path(run.stored) / TOKENIZER_FOLDER)
    if format is None:
        raise UsageError(
            f"chat=true: {run.out} has no chat template; train it on conversations, or convert a folder with one"
        )
    return ChatCodec(choose_chat_vocabulary(run, options), format, sorted(codec.ends), stops)
