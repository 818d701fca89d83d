"""The keys of commands that read texts and conversations."""

import pytest

from shardformer.cli.text_options import SampleOptions
from shardformer.errors import UsageError


def test_beginning_of_text_has_no_effect_on_a_chat():
    with pytest.raises(UsageError, match=r"^bos does nothing with chat=true: the chat template decides it; leave it"):
        SampleOptions(chat=True, bos="true", prompt="Hello")
    assert SampleOptions(bos="true", prompt="Hello").bos == "true"
    assert SampleOptions(chat=True, prompt="Hello").bos == "auto"
