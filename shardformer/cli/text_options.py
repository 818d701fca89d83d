"""The keys that the commands on texts share, and those of `sample`. Imports no JAX."""

import dataclasses
from typing import Literal

from shardformer.config.keys import check_value, key
from shardformer.config.sampling_keys import Sampling
from shardformer.errors import UsageError
from shardformer.quantized.weight_keys import OF_A_RUN


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """The encoding of documents."""

    bos: Literal["auto", "true", "false"] = key(
        "auto",
        "begin every text with the tokenizer's beginning of text, such as <s>; auto: as in training; an end that the "
        "tokenizer's template appends is never added",
    )
    special_tokens: Literal["auto", "true", "false"] = key(
        "auto", "read special tokens such as <|eot_id|> in texts as their ids; auto: as in training; "
                "a converted model reads them, except in messages"
    )  # fmt: skip

    def check_text_options(self) -> None:
        for field in dataclasses.fields(TextOptions):
            check_value(field, getattr(self, field.name))


@dataclasses.dataclass(frozen=True)
class ChatOptions(TextOptions):
    """The prompts as conversations."""

    chat: bool = key(
        False, "read a prompt as a user's message, or as a JSON list of messages; print the reply alone, up to its end"
    )

    def check_chat_options(self) -> None:
        """Raises UsageError for keys that have no effect with chat=true."""
        if self.chat and self.bos != "auto":
            raise UsageError("bos does nothing with chat=true: the chat template decides it; leave it out")


@dataclasses.dataclass(frozen=True)
class WeightsOptions:
    """The checkpoint and the devices."""

    step: int = key(0, "step of the checkpoint; 0 means the best by validation loss")
    ema: bool = key(False, "use the averaged weights of a run trained with ema")
    mesh: str = key(
        "auto",
        "devices as DPxMP; auto is one device; a model too large for one takes 1x8, for instance, and a context too "
        "long for one dp1.cp8.mp1",
    )
    weights: Literal["auto", "float", "int8", "int4", "nf4"] = key("auto", OF_A_RUN)


def check_batch(batch: int) -> None:
    if batch < 1:
        raise UsageError(f"batch must be at least 1, got {batch}")


@dataclasses.dataclass(frozen=True)
class SampleOptions(ChatOptions, WeightsOptions, Sampling):
    """The text and the checkpoint."""

    prompt: str = key("\n", "the text to continue; by default the beginning of text, or a line feed without one")

    def __post_init__(self):
        super().__post_init__()
        self.check_text_options()
        self.check_chat_options()
        if self.chat and self.prompt == SampleOptions.prompt:
            raise UsageError("chat=true needs a message: give prompt=TEXT")
        if not self.prompt:
            raise UsageError("prompt is empty: give at least one character")
