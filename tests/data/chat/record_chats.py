"""Records what transformers makes of the conversations of all families.

    pip install transformers; python -m tests.data.chat.record_chats

It writes goldens.json: for each family the checksums of the ids and masks of its conversations, 8 letters each.
"""

import datetime
import json
import re
import tempfile
import zlib
from pathlib import Path
from unittest import mock

from tests.data.chat import families
from tests.data.chat.families import FAMILIES, GOLDENS


def checksum(ids: list[int], mask: list[int]) -> str:
    return f"{zlib.crc32(json.dumps([list(map(int, ids)), list(map(int, mask))]).encode()):08x}"


def encode_with_transformers(name: str, folder: Path, records: list[dict]) -> list[tuple[list[int], list[int]]]:
    """Returns (ids, mask) of each conversation; a template without {% generation %} is masked by hand."""
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(families.write_tokenizer(name, folder))
    assistant = FAMILIES[name].assistant
    with _fixed_clock():
        return [_encode(tokenizer, record, assistant) for record in records]


def _encode(tokenizer, record: dict, assistant: str) -> tuple[list[int], list[int]]:
    messages, tools = record["messages"], record.get("tools")
    by_tag = not assistant
    found = tokenizer.apply_chat_template(
        messages, tools=tools, return_dict=True, return_assistant_tokens_mask=by_tag, tokenize=True
    )
    if by_tag:
        return found["input_ids"], found["assistant_masks"]
    text = tokenizer.apply_chat_template(messages, tools=tools, tokenize=False)
    mask = [0] * len(found["input_ids"])
    for turn in re.finditer(assistant, text, re.DOTALL):
        first, last = (found.char_to_token(0, place) for place in (turn.start(1), turn.end(1) - 1))
        mask[first : last + 1] = [1] * (last + 1 - first)
    return found["input_ids"], mask


def _fixed_clock():
    from transformers.utils import chat_template_utils

    clock = mock.Mock(wraps=datetime.datetime)
    clock.now.return_value = datetime.datetime.fromisoformat(families.DATE)
    return mock.patch.object(chat_template_utils, "datetime", clock)


def main() -> None:
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in FAMILIES:
            rows = encode_with_transformers(name, Path(folder, name), families.make_records(name))
            found[name] = "".join(checksum(*row) for row in rows)
    GOLDENS.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
