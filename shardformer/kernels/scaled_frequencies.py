"""Rotary frequencies for contexts longer than in the first training, as `rotary_scaling` names them."""

import math

import numpy as np

from shardformer.config.rotary_scaling import RotaryScaling


def scale_frequencies(frequency: np.ndarray, theta: float, scaling: RotaryScaling, long_rows: bool) -> np.ndarray:
    """Returns the scaled frequency of each pair; long_rows: those of rows of more than scaling.old_seq tokens."""
    if scaling.kind == "longrope":
        return frequency / np.array(scaling.long if long_rows else scaling.short, np.float32)
    stretched = frequency / np.float32(scaling.factor)
    if scaling.kind == "linear":
        return stretched
    is_yarn = scaling.kind == "yarn"
    share = _share_by_yarn(frequency, theta, scaling) if is_yarn else _share_by_llama3(frequency, scaling)
    return (1 - share) * stretched + share * frequency


def _share_by_llama3(frequency: np.ndarray, scaling: RotaryScaling) -> np.ndarray:
    """Returns llama3's share: linear in the rotations of each pair within the first training's context."""
    turns_before = np.float32(scaling.old_seq) * frequency / np.float32(2 * math.pi)
    span = scaling.high - scaling.low or 1e-9  # Llama 4's is empty: a pair keeps its frequency or is stretched
    return np.clip((turns_before - scaling.low) / np.float32(span), 0, 1).astype(np.float32)


def _share_by_yarn(frequency: np.ndarray, theta: float, scaling: RotaryScaling) -> np.ndarray:
    """Returns YaRN's share: linear in the number of the pair, as transformers computes it."""
    size = 2 * len(frequency)

    def pair_with(turns: float) -> float:
        return size * math.log(scaling.old_seq / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = pair_with(scaling.high), pair_with(scaling.low)
    if scaling.truncate:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    stretched = (np.arange(size // 2, dtype=np.float32) - first) / np.float32(last - first or 0.001)
    return 1 - np.clip(stretched, 0, 1)
