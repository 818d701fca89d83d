"""The built-in corpus is the same everywhere, and there is something in it to learn."""

import hashlib
import os
import re
import subprocess
import sys

import pytest

from shardformer.data import builtin

GOLDEN = "08c64c3fc294e567c168e38c55cdb35578fd87245fa48b54bd6565f824884877"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def test_text_is_the_golden_one():
    assert _digest(builtin.text()) == GOLDEN


@pytest.mark.slow
def test_text_does_not_depend_on_the_hash_seed():
    program = "import hashlib; from shardformer.data import builtin; "
    program += "print(hashlib.sha256(builtin.text().encode()).hexdigest())"
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(sys.path)}
        ran = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
        assert ran.stdout.strip() == GOLDEN, ran.stderr


def test_size_and_characters():
    text = builtin.text()
    assert 1_000_000 <= len(text) <= 1_200_000
    assert 55 <= len(set(text)) <= 65
    assert set(text[-len(text) // 10 :]) <= set(text[: len(text) * 9 // 10])


def test_it_looks_like_plays():
    text = builtin.text()
    assert not re.search(r"[.!?,]{2}|  | [.,!?]|\{|\}", text)
    headings = set(re.findall(r"^([A-Z]+):$", text, re.MULTILINE))
    assert headings == {speaker.upper() for speaker in builtin.SPEAKERS}


def test_verbs_agree_with_subjects_across_other_nouns():
    nouns, verbs = "|".join(builtin.ALTERNATIVES["noun"]), "|".join(builtin.ALTERNATIVES["verb"])
    clause = rf"\b({nouns})(s?) of the (?:{nouns})(s?) (?:{verbs})(s?) "
    found = re.findall(clause, builtin.text())
    assert len(found) > 1000
    assert all(bool(subject) != bool(between) == bool(verb) for _, subject, between, verb in found)


def test_a_play_remembers_where_its_thing_is_hidden():
    for play in builtin.text().split("THE COMEDY OF THE ")[1:]:
        lost = play.splitlines()[0].lower()
        places = set(re.findall(rf"The {lost} is ([^,]+), good \w+\.", play))
        assert len(places) <= 1
        deniers = set(re.findall(rf"([A-Z]+):\nI know of no {lost}", play))
        finders = set(re.findall(rf"([A-Z]+):\nThe {lost} is ", play))
        assert len(deniers) <= 1
        assert not deniers & finders
