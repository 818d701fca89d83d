"""Published forms of chat data by published templates: ids are those of transformers, masks those of SFTTrainer.

The masks differ where DIFFERENCES says so, and nowhere else; `pytest -s` prints the table.
"""

import json

import pytest

from shardformer.data import file_sources, prepare
from shardformer.data.chat.chat_files import are_chat_files, mask_tokens, read_conversations
from shardformer.data.row_report import RowError
from shardformer.data.source import SourceOptions
from tests.data.chat.chat_formats import FORMS, TEMPLATES
from tests.data.chat.record_formats import GOLDENS, checksum
from tests.data.chat.test_chat_families import open_family

FOUND = json.loads(GOLDENS.read_text())
# The tokens after an end of turn: TRL trains on them, this package does not, as no model generates them.
DIFFERENCES = {"qwen2_5": "\n", "qwen3": "\n", "gemma2": "\n", "phi3_5": "\n", "lfm2_5": ""}


def list_cases() -> list:
    """Returns (template, form); the short tier has each form with the first template, and each template once."""
    forms, cases = [name for name, form in FORMS.items() if form.messages], []
    for number, template in enumerate(TEMPLATES):
        for name in forms:
            is_later = number > 0 and name != forms[0]
            cases.append(pytest.param(template, name, marks=pytest.mark.slow if is_later else []))
    return cases


@pytest.fixture(scope="module", params=TEMPLATES)
def family(request, tmp_path_factory):
    return request.param, *open_family(request.param, tmp_path_factory.mktemp(request.param))


def read_spans(spans: list[list[int]], count: int) -> list[int]:
    mask = [0] * count
    for start, end in spans:
        mask[start:end] = [1] * (end - start)
    return mask


@pytest.mark.parametrize(("family", "name"), list_cases(), indirect=["family"])
def test_ids_and_masks_of_published_forms(name, family, tmp_path):
    template, vocabulary, format = family
    form, expected = FORMS[name], FOUND[template][name]
    path = form.write(tmp_path / "data")
    assert are_chat_files([path], "text")
    if "rejected" in expected[0]:
        with pytest.raises(RowError, match="chat template"):
            list(read_conversations(path, format))
        print(f"{template}, {name}: rejected, as by its template ({expected[0]['rejected']})")
        return
    pieces = list(read_conversations(path, format))
    for piece, golden in zip(pieces, expected, strict=True):
        ids, offsets = vocabulary.encode_with_offsets(piece.text, "TEST")
        mask = mask_tokens(offsets, piece.spans or ()).tolist()
        assert checksum(ids) == golden["ids"]
        if golden["trl"] == "other tokens":
            print(f"{template}, {name}: TRL trains on other tokens: its template keeps empty thoughts")
            continue
        theirs = read_spans(golden["trl"], len(ids))
        only_ours = [n for n in range(len(ids)) if mask[n] and not theirs[n]]
        only_theirs = [n for n in range(len(ids)) if theirs[n] and not mask[n]]
        assert not only_ours
        text = piece.text
        left = [text[slice(*offsets[n])] for n in only_theirs]
        if form.unlearned:  # TRL knows no weights
            assert "It is 4." in "".join(left)
            assert "It is 6" not in "".join(left)
        else:
            assert set(left) <= set(DIFFERENCES[template])
        shown = f"of {sum(theirs)} tokens that TRL learns {len(left)} are only read: {sorted(set(left))}"
        print(f"{template}, {name}: {shown}")


@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if not form.messages])
def test_ids_and_masks_of_prompts_as_text(name, family, tmp_path):
    """TRL encodes them joined and ends with eos_token; here they are encoded apart and end with the end of text."""
    template, vocabulary, _ = family
    form = FORMS[name]
    recipe = file_sources.find_recipe([str(form.write(tmp_path / "data"))], SourceOptions(named_validation=True))
    split = prepare.prepare(recipe, vocabulary, tmp_path / "out", lambda *_: None).split("train")
    start, joined = 0, []
    for golden, end, prompt in zip(FOUND[template][name], split.ends, split.prompts, strict=True):
        ids, start = split.tokens.take(start, end - start), end
        assert ids[-1] == vocabulary.end_of_text
        assert checksum([*ids[:-1], golden["end"]]) == golden["apart"]
        assert prompt == golden["prompt"]
        joined.append(golden["ids"] == golden["apart"])
        if joined[-1]:
            assert golden["trl"] == [[prompt, len(ids)]]
        else:
            print(f"{template}, {name}: for TRL a token crosses the end of the prompt, {vocabulary.decode(ids)!r}")
    assert joined == [True, True, False]
    ends = [vocabulary.decode([id]) for id in (ids[-1], golden["end"])]
    assert ends[0] == ends[1] or ends == ["<|endoftext|>", "<|im_end|>"]
    print(f"{template}, {name}: a completion ends with {ends[0]}, TRL's with {ends[1]}")


def test_mask_of_another_turn_is_noticed(family, tmp_path):
    """The negative twin: TRL trains on no token of a user, so a mask with one is reported as `only_ours`."""
    template, vocabulary, format = family
    [piece] = read_conversations(FORMS["openai lines"].write(tmp_path / "data"), format)
    ids, offsets = vocabulary.encode_with_offsets(piece.text, "TEST")
    start = piece.text.index("And 3 + 3?")
    wrong = mask_tokens(offsets, [(start, start + 3), *(piece.spans or ())]).tolist()
    golden = FOUND[template]["openai lines"][0]["trl"]
    if golden != "other tokens":
        theirs = read_spans(golden, len(ids))
        assert any(mine and not their for mine, their in zip(wrong, theirs, strict=True))
