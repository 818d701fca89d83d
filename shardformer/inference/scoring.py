"""How likely a model finds given token ids: every token counted once, with as much context before it as fits."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
import numpy as np
from jax.sharding import PartitionSpec as P

from shardformer.model import Model


class Score(NamedTuple):
    """Of one document."""

    nats: float
    tokens: int  # that were predicted
    bytes: int = 0


class Request(NamedTuple):
    """Ids to predict, and those that come before them, at least one."""

    context: Sequence[int]
    targets: Sequence[int]


class TargetScore(NamedTuple):
    """Of one request."""

    nats: float
    greedy: bool  # whether each target was the most likely token


SHORTEST = 32  # tokens of a compiled window


class Scorer:
    """Compiled once for each length of a batch of `rows` windows: powers of 2, up to the model's context."""

    def __init__(self, model: Model, rows: int):
        self.model = model
        self.rows = -(-rows // model.config.dp) * model.config.dp
        self._score = jax.jit(self._score_targets, out_shardings=model.sharding(P()))  # for every process to read

    def score(self, params, requests: Sequence[Request]) -> list[TargetScore]:
        """Longer requests than the context are cut into windows, each target predicted once: the first window is full
        of targets, and every later one ends with what is left, so that its targets have the longest context.
        """
        windows = [(i, *window) for i, request in enumerate(requests) for window in self._cut(request)]
        windows.sort(key=lambda window: -len(window[1]))
        nats, greedy = np.zeros(len(requests)), np.ones(len(requests), bool)
        for start in range(0, len(windows), self.rows):
            part = windows[start : start + self.rows]
            length = min(max(SHORTEST, 1 << (len(part[0][1]) - 2).bit_length()), self.model.config.seq)
            ids, weights = np.zeros((self.rows, length + 1), np.int32), np.zeros((self.rows, length), bool)
            for row, (_, tokens, targets) in enumerate(part):
                ids[row, : len(tokens)] = tokens
                weights[row, len(tokens) - 1 - targets : len(tokens) - 1] = True
            loss_BT, right_BT = map(np.asarray, self._score(params, ids[:, :-1], ids[:, 1:]))
            for row, (i, _, _) in enumerate(part):
                nats[i] += loss_BT[row][weights[row]].sum(dtype=np.float64)
                greedy[i] &= right_BT[row][weights[row]].all()
        return [TargetScore(float(n), bool(g)) for n, g in zip(nats, greedy, strict=True)]

    def _cut(self, request: Request) -> list[tuple[list[int], int]]:
        """(at most seq + 1 ids, how many of the last are targets) for each window."""
        seq, ids = self.model.config.seq, [*request.context, *request.targets]
        end, windows = len(request.context), []
        while end < len(ids):
            size = min(seq, len(ids) - end)
            end += size
            windows.append((ids[max(end - seq - 1, 0) : end], size))
        return windows

    def _score_targets(self, params, tokens, targets):
        token = self.model.token_loss(params, tokens, targets)
        return token.nats_BT, token.correct_BT


def score_documents(
    model: Model, params, documents: Sequence[Sequence[int]], rows: int, start: int | None
) -> list[Score]:
    """`start` is the id before a document; without one, its first token is context alone."""
    requests = [Request(ids[:1], ids[1:]) if start is None else Request([start], ids) for ids in documents]
    found = Scorer(model, rows).score(params, requests)
    return [Score(score.nats, len(request.targets)) for score, request in zip(found, requests, strict=True)]
