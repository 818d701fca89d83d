"""Near-copies: signatures against the sets of sequences that Python finds, and planted copies among other documents."""

import itertools
import random

import numpy as np
import pytest

from shardformer.data import near_copies
from shardformer.data.near_copies import BANDS, find_equal, find_near, sign
from shardformer.data.sketch_file import SketchFile
from shardformer.data.word_hashes import hash_words

NAMES = [f"w{n}" for n in range(3000)]


def write_documents(count: int, words: int, seed: int = 0) -> list[str]:
    rng = random.Random(seed)
    return [" ".join(rng.choices(NAMES, k=words)) for _ in range(count)]


def edit(text: str, share: float, seed: int) -> str:
    """Replaces, removes or inserts a word at a share of the positions."""
    rng, words = random.Random(seed), text.split()
    for position in rng.sample(range(len(words)), max(round(share * len(words)), 1)):
        words[position] = rng.choice(["", rng.choice(NAMES), f"{words[position]} {rng.choice(NAMES)}"])
    return " ".join(words)


def sign_texts(texts: list[str]) -> np.ndarray:
    digests = np.arange(len(texts), dtype=np.uint64)
    return sign(near_copies.find_minima(hash_words([text.encode() for text in texts]), len(texts)), digests)


def share_equal(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    return (first.view(np.uint16) == second.view(np.uint16)).mean(axis=1)


def jaccard(first: str, second: str) -> float:
    sets = []
    for text in (first, second):
        words = text.split()
        sets.append({tuple(words[n : n + 5]) for n in range(len(words) - 4)})
    return len(sets[0] & sets[1]) / len(sets[0] | sets[1])


def find(folder, signatures: np.ndarray, is_left_out: np.ndarray | None = None) -> dict[int, int]:
    """Returns {near-copy: an earlier document that it resembles}."""
    file = SketchFile(folder, 1 + BANDS)
    blocks = np.array_split(np.arange(len(signatures)), 3)
    for block in reversed(blocks):
        rows = np.concatenate([np.zeros((len(block), 1), np.uint64), signatures[block]], axis=1).T
        file.append((0, int(block[0])), rows)
    none = np.zeros(file.sort(), bool)
    pairs = find_near(file, 1, none if is_left_out is None else is_left_out, lambda *_: None)
    return {int(a): int(b) for found in pairs for a, b in zip(*found, strict=True)}


@pytest.mark.parametrize("words", [20, 60, 400])
def test_signatures_estimate_the_similarity(words):
    texts = write_documents(60, words)
    for share in (0.02, 0.1, 0.3):
        edited = [edit(text, share, n) for n, text in enumerate(texts)]
        estimated = share_equal(sign_texts(texts), sign_texts(edited))
        exact = np.array([jaccard(a, b) for a, b in zip(texts, edited, strict=True)])
        assert abs((estimated - exact).mean()) < 0.02
        assert (estimated - exact).std() < 0.06  # 0.044 is that of 128 independent permutations at 0.5


def test_signatures_without_borrowed_values_are_noticed(broken):
    broken(near_copies, "find_minima", lambda words, n: np.full((n, near_copies.BINS), 7, np.uint32))
    with pytest.raises(AssertionError):
        test_signatures_estimate_the_similarity(20)


def test_signature_of_parts_is_that_of_the_text():
    """Both parts have the four words before the border, so that none of its sequences is missing."""
    text = " ".join(NAMES[:300])
    parts = near_copies.find_minima(hash_words([" ".join(NAMES[:154]).encode(), " ".join(NAMES[150:300]).encode()]), 2)
    np.testing.assert_array_equal(parts.min(axis=0), near_copies.find_minima(hash_words([text.encode()]), 1)[0])


def test_short_documents_are_near_only_if_equal():
    texts = ["a b c d", "a b c d", "a b c e", "", "!!", "a b c d e"]
    digests = np.array([5, 5, 6, 7, 8, 5], np.uint64)
    signatures = sign(near_copies.find_minima(hash_words([text.encode() for text in texts]), len(texts)), digests)
    for a, b in itertools.combinations(range(len(texts)), 2):
        assert (share_equal(signatures[[a]], signatures[[b]])[0] > 0.1) == ((a, b) == (0, 1))


def test_planted_near_copies_are_found_and_nothing_else(tmp_path):
    texts = [*write_documents(300, 100), *write_documents(300, 40, seed=1)]
    planted = [edit(text, 0.05, n) for n, text in enumerate(texts)]
    found = find(tmp_path, sign_texts([*texts, *planted]))
    assert all(later == earlier + len(texts) for later, earlier in found.items())
    assert len(found) >= 0.95 * len(texts)


def test_longer_bands_would_miss_planted_copies():
    """A twin: 14 bands of 8 values, with which FineWeb was made, find a third of them."""
    texts = write_documents(300, 100)
    signatures, edited = sign_texts(texts), sign_texts([edit(text, 0.05, n) for n, text in enumerate(texts)])
    meet = (signatures == edited)[:, :28].reshape(300, 14, 2).all(axis=2).any(axis=1)
    assert 0.2 < meet.mean() < 0.5


def test_related_documents_stay(tmp_path):
    """Half of the words of each pair are equal, as those of two articles that quote a third one."""
    texts = write_documents(200, 100)
    others = write_documents(200, 50, seed=1)
    related = [" ".join(text.split()[:50]) + " " + other for text, other in zip(texts, others, strict=True)]
    assert 0.3 < np.mean([jaccard(a, b) for a, b in zip(texts, related, strict=True)]) < 0.36
    assert find(tmp_path, sign_texts([*texts, *related])) == {}


def test_progress_counts_the_bytes_of_all_bands(tmp_path):
    file = SketchFile(tmp_path, BANDS)
    file.append((0, 0), sign_texts(write_documents(5, 50)).T)
    calls = []
    none = np.zeros(file.sort(), bool)
    assert sum(len(later) for later, _ in find_near(file, 0, none, lambda *counts: calls.append(counts))) == 0
    assert calls == [(5 * 8 * band, 5 * 8 * BANDS) for band in range(BANDS + 1)]


def test_documents_that_are_left_out_are_no_reason(tmp_path):
    signatures = sign_texts(write_documents(2, 50) * 2)
    assert find(tmp_path, signatures) == {2: 0, 3: 1}
    assert find(tmp_path, signatures, np.array([True, False, False, False])) == {3: 1}


@pytest.mark.parametrize("most", [1 << 20, 10])
def test_equal_values_are_paired_with_first_and_previous(tmp_path, monkeypatch, most):
    monkeypatch.setattr(near_copies, "MOST_KEYS", most)
    values = np.random.default_rng(0).integers(0, 12, 60).astype(np.uint64)
    file = SketchFile(tmp_path, 1)
    file.append((0, 0), values[None, :25])
    file.append((0, 25), values[None, 25:])
    left_out = np.zeros(file.sort(), bool)
    left_out[[0, 9]] = True
    found = {(int(a), int(b)) for pairs in find_equal(file, 0, left_out) for a, b in zip(*pairs, strict=True)}
    expected = set()
    for value in range(12):
        documents = [n for n in range(60) if values[n] == value and not left_out[n]]
        expected |= {(n, documents[0]) for n in documents[1:]} | {(b, a) for a, b in itertools.pairwise(documents)}
    assert found == expected
