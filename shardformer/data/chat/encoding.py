"""Rendered conversations to token ids and the loss mask."""

from collections.abc import Sequence

import numpy as np

from shardformer.data.chat.spans import Span


def mask_tokens(offsets: np.ndarray, spans: Sequence[Span]) -> np.ndarray:
    """Returns 1 for every token that contains a character of a span; offsets: [tokens, 2], in characters."""
    mask = np.zeros(len(offsets), np.uint8)
    starts, ends = offsets[:, 0], offsets[:, 1]
    for start, end in spans:
        inside = np.flatnonzero((ends > start) & (starts < end))
        if inside.size:
            mask[inside[0] : inside[-1] + 1] = 1
    return mask
