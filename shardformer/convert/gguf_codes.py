"""The number types of GGUF: f32, f16, and blocks of 32 values as q8_0 or q4_0 codes, rounded as in ggml's reference."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

BLOCK = 32  # values that share one scale


class Kind(NamedTuple):
    """A number type: its code in the format, the code of files that have it, and the bytes of `values` values."""

    code: int
    file_code: int
    values: int
    size: int
    encode: Callable[[np.ndarray], np.ndarray]  # float32 [rows, columns] -> bytes


def _encode_q8_0(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, BLOCK)
    scale = np.abs(blocks).max(axis=1, keepdims=True) / np.float32(127)
    codes = _round_half_away(blocks * _invert(scale)).astype(np.int8)
    return np.concatenate([scale.astype(np.float16).view(np.uint8), codes.view(np.uint8)], axis=1)


def _encode_q4_0(values: np.ndarray) -> np.ndarray:
    blocks = values.reshape(-1, BLOCK)
    largest = np.take_along_axis(blocks, np.abs(blocks).argmax(axis=1, keepdims=True), axis=1)
    scale = largest / np.float32(-8)
    codes = np.minimum((blocks * _invert(scale) + np.float32(8.5)).astype(np.uint8), 15)
    pairs = codes[:, : BLOCK // 2] | codes[:, BLOCK // 2 :] << 4
    return np.concatenate([scale.astype(np.float16).view(np.uint8), pairs], axis=1)


def _invert(scale: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale != 0)


def _round_half_away(values: np.ndarray) -> np.ndarray:
    """Rounds as C's roundf: halves go away from zero."""
    whole = np.trunc(values)
    return whole + np.copysign(np.abs(values - whole) >= np.float32(0.5), values)


KINDS = {
    "f32": Kind(0, 0, 1, 4, lambda values: values.astype("<f4")),
    "f16": Kind(1, 1, 1, 2, lambda values: values.astype("<f2")),
    "q4_0": Kind(2, 2, BLOCK, 18, _encode_q4_0),
    "q8_0": Kind(8, 7, BLOCK, 34, _encode_q8_0),
}
