"""Against transformers itself, where it is installed (pip install transformers): all conversations of all families."""

import pytest

from tests.data.chat import families
from tests.data.chat.record_chats import encode_with_transformers
from tests.data.chat.test_chat_families import encode_all, open_family

pytest.importorskip("transformers")


@pytest.mark.parametrize("name", families.FAMILIES)
def test_ids_and_masks_equal_those_of_transformers(name, tmp_path):
    records = families.make_records(name)
    theirs = encode_with_transformers(name, tmp_path / "theirs", records)
    ours = encode_all(*open_family(name, tmp_path / "ours"), records)
    for number, (mine, expected) in enumerate(zip(ours, theirs, strict=True)):
        assert mine == (list(expected[0]), list(expected[1])), (name, number, records[number])
