"""The key `chat` of the commands that generate, and the codec that it opens."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from shardformer.cli.text_options import TextOptions
from shardformer.config.keys import key
from shardformer.convert.hf import PUBLISHED_KEYS
from shardformer.data.chat.chat_format import read_format
from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.inference.text_codec import TextCodec
from shardformer.training.run_folder import Run


@dataclasses.dataclass(frozen=True)
class ChatOptions(TextOptions):
    """The prompts as conversations."""

    chat: bool = key(
        False, "read a prompt as a user's message, or as a JSON list of messages; print the reply alone, up to its end"
    )

    def check_chat_options(self) -> None:
        """Raises UsageError for keys that have no effect with chat=true."""
        if self.chat and (given := [name for name in ("bos", "special_tokens") if getattr(self, name) != "auto"]):
            raise UsageError(f"{given[0]} does nothing with chat=true: the chat template decides it; leave it out")


def open_chat_codec(run: Run, codec: TextCodec, stops: Sequence[str] = ()) -> ChatCodec:
    """Returns the codec of a run's chat template; raises UsageError if it has none."""
    format = run.vocabulary.chat or read_format(Path(run.stored) / PUBLISHED_KEYS)
    if format is None:
        raise UsageError(
            f"chat=true: {run.out} has no chat template; train it on conversations, or convert a folder with one"
        )
    return ChatCodec(run.vocabulary, format, sorted(codec.ends), stops)
