"""Ids and masks of published chat templates are those of transformers, for conversations of every kind."""

import dataclasses
import json

import numpy as np
import pytest

from shardformer.data.chat.chat_files import mask_tokens
from shardformer.data.chat.chat_format import ChatFormat, read_format
from shardformer.data.chat.conversations import make_conversation
from shardformer.data.chat.spans import render_with_spans
from shardformer.data.chat.template_process import TemplateProcess
from shardformer.data.hf_tokenizer import open_file
from tests.data.chat import families
from tests.data.chat.families import FAMILIES
from tests.data.chat.record_chats import checksum

CHECKED = 12  # of each family; test_chat_families_live.py compares all


def open_family(name: str, folder):
    """Returns the vocabulary and the format of a family."""
    families.write_tokenizer(name, folder)
    return open_file(folder), dataclasses.replace(read_format(folder), date=families.DATE)


def encode_all(vocabulary, format: ChatFormat, records: list[dict]) -> list[tuple[list[int], list[int]]]:
    rows = []
    with TemplateProcess(format) as process:
        for number, record in enumerate(records):
            text, spans = render_with_spans(process, make_conversation(record, f"record {number}"))
            ids, offsets = vocabulary.encode_with_offsets(text)
            rows.append((ids.tolist(), mask_tokens(offsets, spans).tolist()))
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_ids_and_masks_are_those_of_transformers(name, tmp_path):
    vocabulary, format = open_family(name, tmp_path)
    records = families.make_records(name)[:CHECKED]
    rows = encode_all(vocabulary, format, records)
    expected = json.loads(families.GOLDENS.read_text())[name][: 8 * CHECKED]
    assert "".join(checksum(*row) for row in rows) == expected
    # One more token would change the checksum: the loss ends with the end-of-turn token.
    ids, mask = rows[0]
    mask[np.flatnonzero(mask)[-1]] = 0
    assert checksum(ids, mask) != expected[:8]
