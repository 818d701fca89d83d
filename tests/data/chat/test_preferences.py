"""Preference pairs: explicit and implicit prompts, what is scored, and pairs that are left out as a whole."""

import json

import numpy as np
import pytest

from shardformer import load_corpus
from shardformer.__main__ import main
from shardformer.data.chat import preferences
from shardformer.data.chat.preference_windows import MOST_PAIRS, PreferenceSplit, PreferenceWindows, describe_pairs
from shardformer.data.corpus import choose_row_layout
from shardformer.data.tokens import Tokens
from shardformer.data.vocabulary import Bytes
from shardformer.data.windows import RowLayout
from shardformer.errors import UsageError
from shardformer.objectives.preference_references import find_splits
from tests import shared
from tests.data.chat.chats import PLAIN, write_lines

QUESTION = [{"role": "user", "content": "how are you?"}]
FINE, BAD = ([{"role": "assistant", "content": text}] for text in ("fine", "none of your business"))
TEXTS = {"prompt": "q: ", "chosen": "yes", "rejected": "no"}
TALKS = {"prompt": QUESTION, "chosen": FINE, "rejected": BAD}


def read(tmp_path, record: dict, format=None) -> list[tuple[str, str]]:
    """Returns (text, scored text) of both sides of a record, in bytes."""
    [pair] = preferences.read_pairs(write_lines(tmp_path / "pairs.jsonl", [record]), format)
    found = []
    for side in pair:
        ids, scored = preferences.encode_side(Bytes(), side, "a test")
        text = [chr(n) if n < 256 else "$" for n in ids]
        found.append(("".join(text), "".join(c for c, s in zip(text, scored, strict=True) if s)))
    return found


@pytest.mark.parametrize(
    "record", [TEXTS, {"chosen": "q: yes", "rejected": "q: no"}], ids=["explicit prompt", "implicit prompt"]
)
def test_texts_are_scored_behind_their_prompt(tmp_path, record):
    [chosen, rejected] = read(tmp_path, record)
    assert (chosen[0], rejected[0]) == ("q: yes$", "q: no$")
    # A space before the first difference is a part of the answers, as in TRL.
    space = "" if "prompt" in record else " "
    assert (chosen[1], rejected[1]) == (f"{space}yes$", f"{space}no$")


@pytest.mark.parametrize(
    "record",
    [TALKS, {"chosen": QUESTION + FINE, "rejected": QUESTION + BAD},
     {"prompt": "how are you?", "chosen": QUESTION + FINE, "rejected": QUESTION + BAD}],
    ids=["explicit", "implicit", "prompt as text"],
)  # fmt: skip
def test_messages_are_scored_where_assistants_answer(tmp_path, record):
    [chosen, rejected] = read(tmp_path, record, PLAIN)
    assert "how are you?" in chosen[0]
    assert chosen[1].strip() == "fine"
    assert rejected[1].strip() == "none of your business"


def test_answers_in_the_prompt_are_only_read(tmp_path):
    before = [*QUESTION, {"role": "assistant", "content": "ahem"}, {"role": "user", "content": "and now?"}]
    [chosen, _] = read(tmp_path, TALKS | {"prompt": before}, PLAIN)
    assert "ahem" in chosen[0]
    assert "ahem" not in chosen[1]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (TEXTS | {"rejected": "yes"}, "equal chosen and rejected"),
        (TEXTS | {"rejected": ""}, "an empty rejected"),
        (TEXTS | {"rejected": 3}, "a rejected of int"),
        ({"prompt": "q", "chosen": "x"}, "is not a preference pair"),
    ],
)
def test_wrong_pair_is_named(tmp_path, record, message):
    with pytest.raises(UsageError, match=f"line 1, .*{message}"):
        read(tmp_path, record)


def make_windows(*lengths, seq: int, **layout) -> PreferenceWindows:
    """Returns windows of pairs whose sides have these lengths; the last two tokens of a side are scored."""
    sides = [length for pair in lengths for length in pair]
    scored = np.concatenate([[0] * (n - 2) + [1, 1] for n in sides]).astype(np.uint8)
    ids = np.arange(1, len(scored) + 1, dtype=np.uint16)
    split = PreferenceSplit(Tokens([ids], "TEST"), np.cumsum(sides), Tokens([scored], "TEST"))
    return split.make_windows(RowLayout(seq, **layout))


def test_row_has_both_sides_of_a_pair():
    batch = make_windows((4, 3), seq=4, pack=False).gather(np.arange(2))
    np.testing.assert_array_equal(batch["tokens"][0], [[1, 2, 3, 4], [5, 6, 7, 0]])
    np.testing.assert_array_equal(batch["targets"][0], [[2, 3, 4, 0], [6, 7, 0, 0]])
    np.testing.assert_array_equal(batch["scored"][0], [[0, 1, 1, 0], [1, 1, 0, 0]])
    np.testing.assert_array_equal(batch["pairs"], [[1], [0]])  # the second row pads the batch


def test_pair_with_a_long_side_is_left_out_as_a_whole():
    windows = make_windows((3, 9), (3, 3), seq=4, pack=False)
    assert windows.pairs.tolist() == [1]
    assert "1 left out: a side is longer than seq=4, and no side is cut" in describe_pairs("x", windows)
    with pytest.raises(UsageError, match="give a larger seq"):
        make_windows((3, 9), seq=4, pack=False)


def test_packed_pairs_have_the_same_number_on_both_sides():
    windows = make_windows((3, 4), (4, 3), (8, 8), seq=7, mask_documents=True)
    batch = windows.gather(np.arange(windows.count))
    row = int(np.flatnonzero(batch["pairs"].sum(1) == 2)[0])
    np.testing.assert_array_equal(batch["documents"][row], [[0, 0, 0, 1, 1, 1, 1], [0, 0, 0, 0, 1, 1, 1]])
    np.testing.assert_array_equal(batch["scored"][row], [[1, 1, 0, 0, 1, 1, 0], [0, 1, 1, 0, 1, 1, 0]])
    assert batch["pairs"].shape == (windows.count, MOST_PAIRS)
    assert batch["pairs"].sum() == 3


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.setenv("SHARDFORMER_CACHE", str(tmp_path / "cache"))
    records = [{"prompt": f"{n}? ", "chosen": f"yes {n}", "rejected": f"no, {n}"} for n in range(40)]
    write_lines(tmp_path / "pairs.jsonl", records)
    (tmp_path / "pairs.json").write_text(json.dumps(records))
    write_lines(tmp_path / "text.jsonl", [{"text": f"a text of {n} words " * 9} for n in range(20)])
    (tmp_path / "chat").mkdir()
    write_lines(tmp_path / "chat" / "a.jsonl", [{"messages": [{"role": "user", "content": "Hi"}]}])
    return tmp_path


def load(files, name: str, **keys):
    settings = {"data": str(files / name), "tokenizer": "bytes", "seq": 32, "vocab": 257, "objective": "dpo"}
    config = shared.tiny(**settings | keys)
    corpus = load_corpus(config)
    return corpus, corpus.adapt(config)


def test_lines_and_arrays_are_the_same_pairs(files):
    found = []
    for name in ("pairs.jsonl", "pairs.json"):
        corpus, config = load(files, name)
        assert config.data.documents == "padded"
        windows = PreferenceWindows(find_splits(corpus)[f"{files / name}/train"], choose_row_layout(config))
        found.append(windows.gather(np.arange(windows.count)))
    for name in found[0]:
        np.testing.assert_array_equal(found[0][name], found[1][name])


def test_prepared_pairs_are_shown(files, capsys):
    assert main(["data", "prepare", str(files / "pairs.jsonl"), f"out={files}/tokens", "tokenizer=bytes"]) == 0
    assert main(["data", "show", f"{files}/tokens"]) == 0
    printed = capsys.readouterr().out
    assert "chosen (6 of 9 tokens are scored)" in printed or "chosen (7 of" in printed
    assert ">>>yes" in printed
    assert ">>>no," in printed


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("pairs.jsonl", {"objective": "lm"}, "holds preference pairs .* give objective=dpo"),
        ("text.jsonl", {}, "objective=dpo learns from preference pairs, and .* has none"),
        ("chat/a.jsonl", {}, "holds conversations, expected preference pairs; give records with prompt, chosen"),
        ("*.jsonl", {}, "holds preference pairs and .* does not"),
        ("pairs.jsonl", {"chat_template": "plain"}, "chat_template=plain does nothing"),
    ],
)
def test_wrong_data_for_the_objective_is_rejected(files, name, keys, message):
    with pytest.raises(UsageError, match=message):
        load(files, name, **keys)
