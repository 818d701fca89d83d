"""The keys of the commands that read texts for a trained model."""

import dataclasses
from typing import Literal

from shardformer.config.keys import check_value, key
from shardformer.inference.text_codec import TextCodec
from shardformer.training.run_folder import Run


@dataclasses.dataclass(frozen=True)
class TextOptions:
    """The encoding of texts."""

    bos: Literal["auto", "true", "false"] = key(
        "auto",
        "begin every text with the tokenizer's beginning of text, such as <s>; auto: as in training; an end that the "
        "tokenizer's template appends is never added",
    )
    special_tokens: Literal["auto", "true", "false"] = key(
        "auto", "read special tokens such as <|eot_id|> in texts as their ids; auto: as in training; "
                "a converted model reads them"
    )  # fmt: skip

    def check_text_options(self) -> None:
        for field in dataclasses.fields(TextOptions):
            check_value(field, getattr(self, field.name))


def open_codec(run: Run, options: TextOptions) -> TextCodec:
    """Returns the codec of a run; a run without training data was converted, and reads texts as published."""
    bos = run.config.data.bos if options.bos == "auto" else options.bos
    return TextCodec(run.vocabulary, run.special_tokens, bos, options.special_tokens, published=not run.fingerprint)
