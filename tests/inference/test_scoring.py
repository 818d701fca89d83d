"""Every token is scored once, after the context that fits, as by a plain full pass."""

import functools

import numpy as np
import pytest

from shardformer.inference import scoring
from shardformer.inference.scoring import Request, Scorer, score_documents
from tests import meshes, shared
from tests.inference.test_generator import SEQ, full_pass, model, parameters, prompt


@pytest.fixture(scope="module", autouse=True)
def compile_each_scorer_once():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "Scorer", functools.cache(Scorer))
        yield


def plain(context, targets, **overrides) -> tuple[float, bool]:
    """Scores by one pass for each target, after at most the last SEQ tokens of the window that `Scorer` documents."""
    ids, nats, greedy, end = [*context, *targets], 0.0, True, len(context)
    while end < len(ids):
        size = min(SEQ, len(ids) - end)
        first = max(end + size - SEQ - 1, 0)
        for place in range(end, end + size):
            padded = np.zeros((1, SEQ), np.int32)
            padded[0, : place - first] = ids[first:place]
            logits = full_pass(model(**overrides).config)(parameters(**overrides), padded)
            logits = logits[0, place - first - 1, : model(**overrides).config.model.vocab]
            nats += np.log(np.exp(logits - logits.max()).sum()) + logits.max() - logits[ids[place]]
            greedy &= bool(logits.argmax() == ids[place])
        end += size
    return nats, greedy


REQUESTS = [(3, 4), (1, 1), (SEQ, SEQ), (20, 3), (1, 2 * SEQ + 3), (2, SEQ)]


@pytest.mark.parametrize(("name", "rows"), [("1x1", 3), ("4x2", 1)])
def test_scores_equal_those_of_plain_passes(name, rows):
    requests = [Request(prompt(c).tolist(), prompt(50 + t)[:t].tolist()) for c, t in REQUESTS]
    scorer = Scorer(model(name), rows)
    found = scorer.score(parameters(name), requests)
    ids = np.zeros((scorer.rows, 32), np.int32)  # a shape that has been compiled
    assert all(array.is_fully_replicated for array in scorer._score(parameters(name), ids, ids))
    for request, score in zip(requests, found, strict=True):
        nats, greedy = plain(*request)
        assert score.nats == pytest.approx(nats, rel=1e-4, abs=1e-3)
        assert score.greedy == greedy


@pytest.mark.slow
def test_the_most_likely_token_is_greedy():
    logits = meshes.compute_logits(model().config, parameters(), prompt(5)[None])
    likely = int(logits[0, -1].argmax())
    right, wrong = Scorer(model(), 2).score(
        parameters(), [Request(prompt(5), [likely]), Request(prompt(5), [(likely + 1) % shared.VOCAB])]
    )
    assert right.greedy
    assert not wrong.greedy
    assert right.nats < wrong.nats


def test_documents_follow_an_end_of_text_or_their_first_token():
    ids = prompt(6).tolist()
    (alone,), (after,) = (score_documents(model(), parameters(), [ids], 1, (), end) for end in (None, 7))
    assert (alone.tokens, after.tokens) == (5, 6)
    assert alone.nats == pytest.approx(plain(ids[:1], ids[1:])[0], rel=1e-4)
    assert after.nats == pytest.approx(plain([7], ids)[0], rel=1e-4)


def test_an_absurd_batch_takes_no_more_rows_than_there_are():
    requests = [Request([1], [2, 3]), Request([4], [5])]
    found = Scorer(model(), 10**12).score(parameters(), requests)
    assert [score.nats for score in found] == pytest.approx([plain(*request)[0] for request in requests], rel=1e-4)


def test_documents_follow_their_beginning_of_text():
    ids = prompt(6).tolist()
    (found,) = score_documents(model(), parameters(), [[3, 4, *ids]], 1, [3, 4], 7)
    assert found.tokens == 6
    assert found.nats == pytest.approx(plain([3, 4], ids)[0], rel=1e-4)
