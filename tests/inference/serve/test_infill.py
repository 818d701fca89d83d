"""A prompt and a suffix are read as models of code were trained: with the tokenizer's marks around the gap."""

import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

pytest.importorskip("starlette")

from shardformer.data.hf_tokenizer import HfTokenizer
from shardformer.inference.serve.infill import FORMS, join_around_gap
from shardformer.inference.serve.request_fields import ApiError
from shardformer.inference.text_codec import TextCodec
from tests.data.chat.chatml_bytes import make_vocabulary
from tests.inference.serve.http_server import ask

BYTES = 256


def make_codec(marks) -> TextCodec:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = tokenizers.Tokenizer(models.BPE({letter: n for n, letter in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(marks))
    return TextCodec(HfTokenizer("TEST", tokenizer.to_str()))


@pytest.mark.parametrize("form", FORMS, ids=range(len(FORMS)))
def test_marks_are_around_the_gap(form):
    codec = make_codec(form)
    prefix, suffix, middle = (BYTES + form.index(mark) for mark in form)
    before, after = codec.encode_bare("a"), codec.encode_bare("bc")
    ids, shown = join_around_gap(codec, before, after)
    assert ids == [prefix, *before, suffix, *after, middle]
    assert ids[shown] == before


def test_tokenizer_without_marks_is_named():
    with pytest.raises(ApiError, match="no marks of a gap"):
        join_around_gap(TextCodec(make_vocabulary()), [1], [2])
    with pytest.raises(ApiError, match="no marks of a gap"):
        join_around_gap(make_codec(FORMS[0][:2]), [1], [2])


def test_server_reads_prompt_and_suffix(service, port, monkeypatch):
    """ChatML's two marks stand for those of a gap; text that looks like a mark stays text."""
    first, second = make_vocabulary().decode([256]), make_vocabulary().decode([257])
    monkeypatch.setattr("shardformer.inference.serve.infill.FORMS", ((first, second, first),))
    body = {"prompt": "ab", "suffix": first, "max_tokens": 2, "echo": True, "logprobs": 1, "temperature": 0}
    before = service.codec.encode_bare("ab")
    ids = [256, *before, 257, *service.codec.encode_bare(first), 256]
    (choice,), (joined,) = (ask(port, body | keys)["choices"] for keys in ({}, {"prompt": ids, "suffix": None}))
    assert joined["text"] == service.codec.decode(ids) + choice["text"].removeprefix("ab")
    assert choice["text"].startswith("ab")
    assert (choice["logprobs"].pop("text_offset"), joined["logprobs"].pop("text_offset")[0]) == ([0, 1, 2, 3], 0)
    for key, values in choice["logprobs"].items():  # of the tokens of the prompt, and of those that were drawn
        assert values == joined["logprobs"][key][1 : 1 + len(before)] + joined["logprobs"][key][len(ids) :]
    assert ask(port, body | {"prompt": before})["choices"][0]["text"] == choice["text"]
