"""Batches of random tokens, for measurements and verifications."""

import numpy as np

from shardformer.config import Config


def draw_tokens(config: Config) -> dict[str, np.ndarray]:
    """Returns a batch of random tokens."""
    shape = config.training.batch, config.model.seq + 1
    tokens = np.random.default_rng(config.training.seed).integers(0, config.model.vocab, shape, np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}
