"""The end of an assistant's turn, for the generation_config.json of a model that was trained on conversations."""

from collections.abc import Callable

from shardformer.errors import UsageError
from shardformer.inference.chat_codec import ChatCodec
from shardformer.training.run_folder import Run

UNKNOWN = "generation_config.json names no end of an assistant's turn:"


def find_end_of_turn(run: Run, say: Callable[[str], None]) -> int | None:
    """Returns the id that ends a turn; None without training here, without a template, and where a text ends it."""
    format = run.vocabulary.chat
    if format is None or not run.fingerprint:  # a converted model keeps what was published
        return None
    try:
        codec = ChatCodec(run.vocabulary, format)
    except UsageError as error:
        say(f"{UNKNOWN} {error}")
        return None
    if codec.ends:
        return min(codec.ends)
    say(f"{UNKNOWN} text ends it; give it to transformers: generate(..., stop_strings={codec.strings!r})")
    return None
