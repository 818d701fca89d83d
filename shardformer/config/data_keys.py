"""Keys of the data: sources, tokens, and how rows are made of them."""

import dataclasses
import os
import stat
from typing import Literal

from shardformer.config.keys import KeyGroup, UsedIf, key, require
from shardformer.config.parsing import shorten

MAX_BPE = 1 << 20
WITH_SPECIAL_TOKENS = UsedIf(
    lambda data: data.tokenizer not in ("chars", "bytes", "ids"),
    "with a tokenizer that has none; give a tokenizer.json or bpe:N",
)
WITH_RECORDS = UsedIf(
    lambda data: data.source not in ("auto", "tiny_shakespeare", "builtin") or data.validation,
    "without data from .jsonl records; name them with data=",
)


@dataclasses.dataclass(frozen=True)
class DataKeys(KeyGroup):
    """The data"""

    # `data` and `validation` may move: a run recognises its text by a fingerprint.
    source: str = key(
        "auto", "auto, tiny_shakespeare, builtin, tfds:NAME, text files, token files, or 'a=3,b=1' of them", flat="data"
    )
    tokenizer: str = key(
        "auto", "chars, bytes, bpe:N (trained on the data), a tokenizer.json, or ids; auto: by the data", fixed=True
    )
    validation: str = key(
        "", "another source for validation, or a share of the data; empty means 0.05, and 2 MB at most"
    )
    order: Literal["epoch", "random", "file"] = key(
        "epoch", "order of the rows; epoch: each once, shuffled; random: nanoGPT's; file: as stored", fixed=True
    )
    documents: Literal["packed", "masked", "padded"] = key(
        "packed",
        "documents in rows; packed: rows are filled across documents; masked: and attention and positions end where a "
        "document ends; padded: each document has rows of its own",
        fixed=True,
    )
    mask_prompt: bool = key(
        False, "leave prompts out of the loss, for .jsonl records with prompt and completion", fixed=True
    )
    chat_template: str = key(
        "auto",
        "template of conversations in .jsonl files: chatml, llama3 or plain; auto: that of the tokenizer's folder",
        fixed=True,
        used_if=WITH_RECORDS,
    )
    text: str = key("text", "field that holds the text of .jsonl records", used_if=WITH_RECORDS)
    bad_rows: Literal["stop", "skip"] = key(
        "stop",
        "records that cannot be learned; stop: end with all causes at once; skip: leave them out and count them",
        used_if=WITH_RECORDS,
    )
    special_tokens: bool = key(
        False,
        "recognise a tokenizer.json's special tokens in texts and messages; false reads them as plain text",
        fixed=True,
        used_if=WITH_SPECIAL_TOKENS,
    )
    bos: Literal["auto", "true", "false"] = key(
        "auto",
        "begin every document with the tokenizer's beginning of text, such as <s>; auto: if the tokenizer adds one",
        fixed=True,
        used_if=WITH_SPECIAL_TOKENS,
    )

    def check(self) -> None:
        require(
            not _is_special_file(self.source),
            f"data={self.source} is a device or a pipe, which cannot be read again on resume; "
            "write the text into a file and give its path",
        )
        check_tokenizer(self.tokenizer)
        require(
            not (self.order == "file" and self.documents == "padded"),
            "order=file reads rows as they are stored; give documents=packed or masked",
        )


def check_tokenizer(tokenizer: str) -> None:
    require(tokenizer, "tokenizer is empty; give chars, bytes, bpe:N, ids, auto or the path of a tokenizer.json")
    if not tokenizer.startswith("bpe:"):
        return
    size = tokenizer.removeprefix("bpe:")
    require(
        size.isascii() and size.isdecimal() and len(size) < 8 and 257 <= int(size) <= MAX_BPE,
        f"tokenizer=bpe:N takes N from 257 (all bytes and one more) to {MAX_BPE}, got {shorten(tokenizer)}",
    )


def _is_special_file(path: str) -> bool:
    """Returns True for a device, a pipe or a socket, such as /dev/stdin."""
    try:
        mode = os.stat(os.path.expanduser(path)).st_mode
    except OSError:
        return False  # a path that does not exist is rejected where it is read
    return not (stat.S_ISREG(mode) or stat.S_ISDIR(mode))
