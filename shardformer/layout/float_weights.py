"""The stored form of weights that are not quantised: as they are."""

from collections.abc import Callable
from typing import Any

from shardformer.kernels.vocabulary_loss import loss_in_chunks, multiply_table


class FloatWeights:
    """Parameters stored as they are; `QuantizedWeights` has the same methods."""

    multiply_table: Callable = staticmethod(multiply_table)  # activations by an output table
    loss_in_chunks: Callable = staticmethod(loss_in_chunks)

    def store(self, params: dict) -> dict:
        """Returns the stored form of a tree of parameters, or of their shapes."""
        return params

    def name_parts(self, params: dict) -> dict:
        """Returns the stored form of parameters whose matrices `Model.store_leaf` has quantised one by one."""
        return params

    def suffixes(self, name: str) -> tuple[str, ...]:
        """Returns the ends of the names of the parts of a quantised parameter; there is none here."""
        raise NotImplementedError(name)

    def quantize(self, name: str, w: Any) -> tuple:
        """Returns the parts of a quantised parameter: codes, scales and perhaps the scales of scales."""
        raise NotImplementedError(name)

    def is_quantized(self, name: str) -> bool:
        """Returns whether the parameter of this full name is stored as codes and scales."""
        return False


FLOAT = FloatWeights()
