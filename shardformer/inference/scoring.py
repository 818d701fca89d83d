"""Log-likelihoods of given token ids: every token is counted once, after as much context as fits."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.devices import programs
from shardformer.inference.generator import round_up, round_up_tokens
from shardformer.model import Model
from shardformer.model.measuring import Measures


class Score(NamedTuple):
    """The score of one document."""

    nats: float
    tokens: int  # number of predicted tokens
    bytes: int = 0


class Request(NamedTuple):
    """The ids to predict and the ids before them, at least one."""

    context: Sequence[int]
    targets: Sequence[int]


class TargetScore(NamedTuple):
    """The score of one request."""

    nats: float
    greedy: bool  # whether each target was the most likely token


SHORTEST = 32  # tokens of a compiled window


def do_nothing() -> None:
    pass


class Scorer:
    """Scores of requests under one model, `rows` windows at a time; `before_batch` is called before each batch.

    Compiles once for each window length: powers of 2, up to the model's context.
    """

    def __init__(self, model: Model, rows: int, before_batch: Callable[[], None] = do_nothing):
        self.model, self._before_batch = model, before_batch
        self.rows = -(-rows // model.config.parallel.dp) * model.config.parallel.dp
        # Replicated, so that every process can read the scores.
        self._score = programs.jit(self._score_targets, out_shardings=model.sharding(P()))

    def score(self, params, requests: Sequence[Request]) -> list[TargetScore]:
        """Returns the score of each request, in order.

        A request that is longer than the context is split into windows. Each target is predicted once: the first window
        is full of targets, and the last ends with the remaining ones, so that they have the longest context.
        """
        windows = [(i, *window) for i, request in enumerate(requests) for window in self._cut(request)]
        windows.sort(key=lambda window: -len(window[1]))
        nats, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        dp = self.model.config.parallel.dp
        rows = min(self.rows, dp * round_up(-(-len(windows) // dp)))
        for start in range(0, len(windows), rows):
            self._before_batch()
            part = windows[start : start + rows]
            length = round_up_tokens(round_up(len(part[0][1]) - 1, SHORTEST), self.model.config.parallel.cp)
            length = min(length, self.model.config.model.seq)
            ids, weights = np.zeros((rows, length + 1), np.int32), np.zeros((rows, length), bool)
            for row, (_, tokens, targets) in enumerate(part):
                ids[row, : len(tokens)] = tokens
                weights[row, len(tokens) - 1 - targets : len(tokens) - 1] = True
            loss_BT, right_BT = map(np.asarray, self._score(params, ids[:, :-1], ids[:, 1:]))
            for row, (i, _, _) in enumerate(part):
                nats[i] += loss_BT[row][weights[row]].sum(dtype=np.float64)
                greedy[i] &= right_BT[row][weights[row]].all()
        return [TargetScore(float(n), bool(g)) for n, g in zip(nats, greedy, strict=True)]

    def _cut(self, request: Request) -> list[tuple[list[int], int]]:
        """Returns (at most seq + 1 ids, the number of targets at their end) for each window."""
        seq, ids = self.model.config.model.seq, [*request.context, *request.targets]
        end, windows = len(request.context), []
        while end < len(ids):
            size = min(seq, len(ids) - end)
            end += size
            windows.append((ids[max(end - seq - 1, 0) : end], size))
        return windows

    def _score_targets(self, params, tokens, targets) -> tuple[jax.Array, jax.Array]:
        token = Measures(self.model).token_loss(params, tokens, targets)
        return token.nats_BT, token.correct_BT


def score_documents(
    model: Model,
    params,
    documents: Sequence[Sequence[int]],
    rows: int,
    beginning: Sequence[int] = (),
    end_of_text: int | None = None,
) -> list[Score]:
    """Scores each document after the beginning of text that it starts with, or else after an end of text.

    If there is neither, the first token of a document is not predicted.
    """
    requests = [_make_request(ids, list(beginning), end_of_text) for ids in documents]
    result = Scorer(model, rows).score(params, requests)
    return [Score(score.nats, len(request.targets)) for score, request in zip(result, requests, strict=True)]


def _make_request(ids: Sequence[int], beginning: list[int], end_of_text: int | None) -> Request:
    known = len(beginning)
    if known and list(ids[:known]) == beginning:
        return Request(ids[:known], ids[known:])
    return Request(ids[:1], ids[1:]) if end_of_text is None else Request([end_of_text], ids)
