"""The keys of the commands of `data`. Imports no NumPy, so that `data --help` prints them at once."""

import dataclasses
from typing import Literal

from shardformer.config import check_tokenizer
from shardformer.config.keys import KeyGroup, key
from shardformer.errors import UsageError

BPE = "bpe:32768"  # the default for documents


@dataclasses.dataclass(frozen=True)
class PrepareOptions(KeyGroup):
    """data prepare: documents and token files to a folder of token files."""

    out: str = key("", "the folder to write")
    tokenizer: str = key(
        "auto",
        "chars, bytes, bpe:N (trained on these texts), ids, or the path of a tokenizer.json; "
        f"auto: {BPE}, or ids for token files",
    )
    validation: str = key("", "share of validation, and as much for test; none; empty means 0.05, and 2 MB at most")
    text: str = key("text", "name of the field that holds the text of .jsonl records")
    chat_template: str = key("auto", "template of conversations: chatml, llama3 or plain; auto: that of the tokenizer")
    bad_rows: Literal["stop", "skip"] = key("stop", "end with all causes at once, or leave bad records out")
    pairs: bool = key(False, "read chosen and rejected of records that have messages too")
    dedup: Literal["none", "exact", "near"] = key(
        "none", "leave out documents equal to an earlier one; near: and those with half of all 5-word sequences in both"
    )
    against: str = key("", "test files; documents that share 13 words in a row with one are left out: a.jsonl,b.jsonl")
    special_tokens: bool = key(False, "recognise a tokenizer.json's special tokens in texts")
    bos: Literal["auto", "true", "false"] = key(
        "auto", "begin every document with the tokenizer's beginning of text; auto: if the tokenizer adds one"
    )

    def check(self) -> None:
        from shardformer.data.corpus import parse_validation  # imports NumPy, as the other one below

        if not self.out:
            raise UsageError("data prepare needs a folder to write: out=FOLDER")
        if self.validation != "none" and parse_validation(self.validation)[0]:
            raise UsageError(f"data prepare takes validation=SHARE or validation=none, got {self.validation!r}")
        check_tokenizer(self.tokenizer)


@dataclasses.dataclass(frozen=True)
class ShowOptions:
    """data show: a file of conversations."""

    tokenizer: str = key("auto", "a folder with tokenizer.json, such as a Hugging Face folder; auto: bytes")
    chat_template: str = key("auto", "chatml, llama3 or plain; auto: that of the tokenizer")
    text: str = key("text", "name of the field that holds the text of .jsonl records")
    pairs: bool = key(False, "read chosen and rejected of records that have messages too")


@dataclasses.dataclass(frozen=True)
class ExportOptions:
    """data export: a prepared folder as GPT-J's TFRecords."""

    out: str = key("", "the .tfrecords file to write; its index is written beside it")
    split: str = key("train", "train, validation or test")
    ids: int = key(2049, "token ids of one record: one more than GPT-J's context")

    def __post_init__(self):
        from shardformer.data.tfrecords import SUFFIXES

        if not self.out.endswith(SUFFIXES):
            raise UsageError(f"data export needs a file to write: out=NAME_COUNT.tfrecords, got out={self.out!r}")
        if self.ids < 2:
            raise UsageError(f"ids must be at least 2, got {self.ids}")
