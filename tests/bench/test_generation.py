"""`bench generate` writes with the model that it names, and says what it measured."""

import re

import numpy as np
import pytest

from shardformer.__main__ import main
from shardformer.bench import generation

SMALL = ["preset=tiny", "layers=1", "positions=learned", "block=sequential", "bias=all", "tied=true", "seq=32"]
TIMES = {"ours": [1.0, 2.0, 3.0], "theirs": [6.0, 4.0, 9.0]}


@pytest.mark.slow
def test_a_table_for_each_number_of_rows(capsys):
    """Without the peer, which takes another library, and with one that answers as ours does."""
    assert main(["bench", "generate", *SMALL, "rows=1,3", "tokens=4", "rounds=2"]) == 0
    out = capsys.readouterr().out
    assert re.findall(r"^(\d+) rows?\b", out, re.MULTILINE) == ["1", "3"]
    assert "16 + 4 tokens" in out
    assert len(re.findall(r"shardformer 1x1 +[\d.]+", out)) == 2
    assert len(re.findall(r"a product of a vector and a float32 matrix reads [\d.]+ GB/s", out)) == 2


def test_differing_tokens_are_reported(capsys, broken):
    def zeros(prompts, tokens):
        return np.zeros((len(prompts), tokens), np.int32)

    broken(generation, "why_not", lambda name, config: "" if name == "transformers" else "absent")
    broken(generation, "load_transformers", lambda config, params: zeros)
    assert main(["bench", "generate", *SMALL, "rows=1", "tokens=4", "rounds=1"]) == 0
    ours, theirs = re.findall(r"([\d.]+)%$", capsys.readouterr().out, re.MULTILINE)
    assert float(theirs) < float(ours) == 100


def test_speed_is_ours_over_each_peers():
    contenders = [generation.Contender(name, None, times=times, cpu_times=times) for name, times in TIMES.items()]
    rows = generation._format(contenders, tokens=12).splitlines()[1:]
    assert [row.split()[-2] for row in rows] == ["1.00", "3.00"]
    assert [row.split()[-3] for row in rows] == ["6.0", "2.0"]


@pytest.mark.parametrize(
    ("message", "word"),
    [
        ("do not fit seq=32", "tokens=17"),
        ("rows takes numbers with commas", "rows=1,x"),
        ("and prompt=32 do not fit seq=32", "prompt=32"),
        ("seeds and prompt are at least 1", "prompt=0"),
    ],
)
def test_impossible_sizes_are_rejected(message, word, capsys):
    assert main(["bench", "generate", *SMALL, word]) == 2
    assert message in capsys.readouterr().err


def test_the_last_tokens_against_the_first():
    steady, slower = ([(i * cost**2, 1) for i in range(1, 30)] for cost in (1, 2))
    assert generation._last_against_first(steady) == generation._last_against_first(slower) == 1
    growing = [(i * i, 1) for i in range(30)]
    assert generation._last_against_first(growing) > 5
