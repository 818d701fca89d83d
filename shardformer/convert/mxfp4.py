"""Matrices in MXFP4, as gpt-oss stores its experts: four bits a number, and a power of two for each 32 of them."""

from pathlib import Path
from typing import NamedTuple

import numpy as np

from shardformer.convert.tensors import Tensor
from shardformer.errors import UsageError

CODES, EXPONENTS = "_blocks", "_scales"  # the ends of the names of the two arrays of one
BIAS = 127  # of the stored exponents
_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_PAIRS = np.stack([_VALUES[np.arange(256) & 15], _VALUES[np.arange(256) >> 4]], axis=-1)  # of each byte


class Packed(NamedTuple):
    """Matrices [experts, inputs, outputs], not yet read; the files have them transposed."""

    codes: Tensor  # bytes [experts, outputs, groups, 16]; each has two numbers, the first one in its lower half
    exponents: Tensor  # bytes [experts, outputs, groups]

    @property
    def path(self) -> Path:
        return self.codes.path

    @property
    def name(self) -> str:
        return self.codes.name.removesuffix(CODES)

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(np.float32)

    @property
    def shape(self) -> tuple[int, ...]:
        experts, outputs, groups, of_group = self.codes.shape
        return experts, 2 * groups * of_group, outputs

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns the matrices of some experts in float32."""
        pairs_EOGC2 = _PAIRS[self.codes.read(rows)]
        exponents_EOG = self.exponents.read(rows).astype(np.int32) - BIAS
        with np.errstate(over="ignore"):  # the caller reports infinite weights
            values_EOGC2 = np.ldexp(pairs_EOGC2, exponents_EOG[..., None, None])
        matrices_EIO = values_EOGC2.reshape(*values_EOGC2.shape[:2], -1).swapaxes(1, 2)
        return matrices_EIO if seen is None else matrices_EIO.reshape(-1, *seen[1:])


def unpack(tensors: dict[str, Tensor]) -> dict[str, Tensor | Packed]:
    """Returns the arrays with one for each pair NAME_blocks and NAME_scales, under the name NAME."""
    result: dict[str, Tensor | Packed] = dict(tensors)
    for name, codes in tensors.items():
        exponents = tensors.get(name.removesuffix(CODES) + EXPONENTS)
        if name.endswith(CODES) and exponents is not None:
            del result[name], result[name.removesuffix(CODES) + EXPONENTS]
            result[name.removesuffix(CODES)] = _join(codes, exponents)
    return result


def _join(codes: Tensor, exponents: Tensor) -> Packed:
    """Returns the matrices of two arrays of a file; rejects other forms than gpt-oss'."""
    for tensor, expected in ((exponents, exponents.shape), (codes, (*exponents.shape, 16))):
        if tensor.dtype != np.uint8 or tensor.shape != expected or len(exponents.shape) != 3:
            raise UsageError(
                f"{tensor.path}: {tensor.name} is {tensor.dtype} {list(tensor.shape)}, and {exponents.name} "
                f"{list(exponents.shape)}; expected bytes [experts, outputs, groups, 16] and [experts, outputs, groups]"
            )
    return Packed(codes, exponents)
