"""The built-in corpus is the same everywhere, and there is something in it to learn."""

import hashlib
import os
import re
import subprocess
import sys

from shardformer.data import builtin, lexicon

GOLDEN = "2d72f779536d288f323f852b687b2d83adea7e4171194ad5bcdbb45c98eb996f"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_text_is_the_golden_one():
    assert _digest(builtin.text()) == GOLDEN


def test_text_does_not_depend_on_the_hash_seed():
    program = "import hashlib; from shardformer.data import builtin; "
    program += "print(hashlib.sha256(builtin.text().encode()).hexdigest())"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ran.stdout.strip() == GOLDEN, ran.stderr


def test_another_seed_writes_other_plays():
    first, second, again = (builtin.Play(builtin.Chance(seed)).text() for seed in (1, 2, 1))
    assert first == again != second


def test_size_and_characters():
    text = builtin.text()
    assert 1_000_000 <= len(text) <= 1_200_000
    assert 55 <= len(set(text)) <= 65
    assert set(text[-len(text) // 10 :]) <= set(text[: len(text) * 9 // 10])


def test_it_looks_like_plays():
    text = builtin.text()
    assert not re.search(r"[.!?,]{2}|  | [.,!?]|\{|\}", text)
    headings = set(re.findall(r"^([A-Z]+):$", text, re.MULTILINE))
    assert headings == {speaker.name.upper() for speaker in lexicon.SPEAKERS}


def test_questions_are_answered():
    """The first line of the next speech tells how many of the very thing that was asked about."""
    asked = re.findall(r"How many (\S+) did you (\S+), [^?]+\?\n\n[A-Z]+:\n(?:\[.+\]\n)?(.*)\n", builtin.text())
    past = {plain: past for plain, _, past in lexicon.VERBS}
    assert len(asked) > 500
    for things, verb, answer in asked:
        assert re.match(rf"I {past[verb]} \w+ {things}, ", answer), (things, verb, answer)


def test_couplets_rhyme():
    rhyme_of = {word: number for number, rhyme in enumerate(lexicon.RHYMES) for word in rhyme}
    opening = "|".join(re.escape(opening.split("{")[0]) for opening in lexicon.VERSE_OPENINGS)
    couplets = re.findall(rf"^(?:{opening}).* (\S+),\n(?:{opening}).* (\S+)\.$", builtin.text(), re.MULTILINE)
    assert len(couplets) > 1000
    assert all(rhyme_of[first] == rhyme_of[second] and first != second for first, second in couplets)
