"""Baichuan and Baichuan 2 of 7B as Llamas: queries, keys and values are one matrix, and Baichuan 2 norms its head.

Each row of Baichuan 2's head has the length 1 when it multiplies (`NormHead`). The rows are divided by their lengths as
they are read, which changes no logits. Training then moves the rows as those of any other head.
"""

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from shardformer.convert.tensors import Computed, Tensor
from shardformer.errors import RunError, UsageError
from shardformer.storage import read_small

NAME, HEAD, PACK = "baichuan", "lm_head.weight", ".self_attn.W_pack.weight"
_OF_TRAINING = ("model_max_length", "z_loss_weight", "_from_model_config", "architectures", "auto_map")
NORMED, PLAIN = "BaichuanForCausalLM", "BaiChuanForCausalLM"  # the classes of Baichuan 2 and of Baichuan
SHORTEST = 1e-12  # length of a row by which torch's `normalize` divides at least


class UnitRows(Computed):
    """A matrix whose rows are divided by their lengths when they are read; `compute` reads some of them."""

    def read(self, rows: slice = slice(None), seen: tuple[int, ...] | None = None) -> np.ndarray:
        """Returns rows of the array; it is seen only in its own shape."""
        values = self.compute(rows).astype(np.float32)
        return values / np.maximum(np.linalg.norm(values, axis=1, keepdims=True), SHORTEST)


def rename_config(theirs: dict[str, Any]) -> dict[str, Any]:
    """Returns the config.json of a Llama for that of a Baichuan of 7B; others stay as they are."""
    if theirs.get("model_type") != NAME:
        return theirs
    if not theirs.get("max_position_embeddings"):
        raise UsageError(
            f"model_type={NAME!r} without max_position_embeddings is not computed here; missing: ALiBi in a Llama "
            "(Baichuan of 13B)"
        )
    if theirs.get("architectures") not in ([NORMED], [PLAIN]):
        raise UsageError(
            f"architectures={theirs.get('architectures')!r:.80} does not name the head of a {NAME}; expected "
            f"{[NORMED]} (normed, Baichuan 2) or {[PLAIN]}"
        )
    is_normed = theirs["architectures"] == [NORMED]
    if is_normed and theirs.get("tie_word_embeddings"):
        raise UsageError("tie_word_embeddings=True is not computed with a normed head; expected False")
    return {key: value for key, value in theirs.items() if key not in _OF_TRAINING} | {"model_type": "llama"}


def is_packed(tensors: Collection[str]) -> bool:
    """Returns whether these are the names of a Baichuan's arrays."""
    return any(name.endswith(PACK) for name in tensors)


def unpack_arrays(folder: Path, tensors: dict[str, Tensor]) -> dict[str, Tensor | Computed]:
    """Returns the arrays of a Baichuan under the names of a Llama."""
    architectures = json.loads(read_small(folder / "config.json")).get("architectures")
    result: dict[str, Tensor | Computed] = {}
    for name, tensor in tensors.items():
        if name.endswith(PACK):
            if len(tensor.shape) != 2 or tensor.shape[0] % 3:
                raise RunError(
                    f"{tensor.path}: {name:.100} is {list(tensor.shape)}, expected the rows of queries, keys and "
                    "values, as many of each; copy it again"
                )
            size = tensor.shape[0] // 3
            for i, part in enumerate("qkv"):
                read = functools.partial(tensor.read, slice(i * size, (i + 1) * size))
                theirs = name.replace("W_pack", f"{part}_proj")
                result[theirs] = Computed(tensor.path, theirs, tensor.dtype, (size, *tensor.shape[1:]), read)
        elif name == HEAD and architectures == [NORMED]:
            result[name] = UnitRows(tensor.path, name, tensor.dtype, tensor.shape, tensor.read)  # rejected as integers
        else:
            result[name] = tensor
    return result
